//! An error as one line that names the thing and what to do about it.

use kafka::ErrorCode;
use kafka_client::ClientError;

/// The whole chain of an error in one line, with advice where there is any.
pub fn line(error: &anyhow::Error) -> String {
    if let Some(status) = find::<tonic::Status>(error) {
        return control_refusal(status);
    }
    let mut text = String::new();
    for cause in error.chain() {
        let cause = cause.to_string().split_whitespace().collect::<Vec<_>>().join(" ");
        // Many errors say what their cause says.
        if !text.ends_with(&cause) {
            text = if text.is_empty() { cause } else { format!("{text}: {cause}") };
        }
    }
    if let Some(advice) = find::<ClientError>(error).and_then(client_advice) {
        text.truncate(text.trim_end_matches('.').len());
        text.push_str("; ");
        text.push_str(&advice);
    }
    text
}

fn find<E: std::error::Error + Send + Sync + 'static>(error: &anyhow::Error) -> Option<&E> {
    error.chain().find_map(|cause| cause.downcast_ref::<E>())
}

fn client_advice(error: &ClientError) -> Option<String> {
    match error {
        ClientError::Connect { reason, .. } if reason.contains("refused") => {
            Some("is a broker running there? `sealane local` starts one, --server names another".to_owned())
        }
        ClientError::Connect { .. } => Some("--server gives the address of a broker".to_owned()),
        ClientError::Closed { .. } => {
            Some("does the port speak Kafka, and plain or TLS as you asked (--tls)?".to_owned())
        }
        ClientError::Refused { what, .. } => refusal_advice(error.code()?, what),
        _ => None,
    }
}

fn refusal_advice(code: ErrorCode, what: &str) -> Option<String> {
    let topic = what.strip_prefix("topic ");
    Some(match (code, topic) {
        (ErrorCode::UnknownTopicOrPartition, Some(name)) => format!(
            "it does not exist; `sealane topic list` shows what there is, `sealane topic create {name}` makes it"
        ),
        (ErrorCode::UnknownTopicOrPartition, None) => "`sealane topic list` shows what there is".to_owned(),
        (ErrorCode::GroupIdNotFound, _) => "`sealane group list` shows what there is".to_owned(),
        (ErrorCode::TopicAlreadyExists, _) => "`sealane topic alter` changes it".to_owned(),
        (ErrorCode::CoordinatorLoadInProgress | ErrorCode::CoordinatorNotAvailable, _) => {
            "the broker is still starting; try again".to_owned()
        }
        (ErrorCode::KafkaStorageError, _) => {
            "the broker cannot write: is its disk full? See its log".to_owned()
        }
        _ => return None,
    })
}

/// The control service's messages are written for people.
fn control_refusal(status: &tonic::Status) -> String {
    match status.code() {
        tonic::Code::Unavailable => format!("the control service cannot be reached: {}", status.message()),
        tonic::Code::Unimplemented => {
            "the control service does not know this call; is the broker older?".to_owned()
        }
        _ => status.message().to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use kafka_client::Endpoint;

    use super::*;

    #[test]
    fn an_unknown_topic_is_named_with_what_to_do() {
        let error = ClientError::check(|| "topic orders".to_owned(), 3, None).expect_err("code 3");
        assert_eq!(
            line(&error.into()),
            "topic orders: UnknownTopicOrPartition (3); it does not exist; `sealane topic list` shows what there \
             is, `sealane topic create orders` makes it"
        );
    }

    #[test]
    fn a_refused_connection_says_how_to_start_a_broker() {
        let endpoint = Endpoint::new("127.0.0.1", 9092);
        let error = ClientError::Connect { endpoint, reason: "Connection refused (os error 111)".to_owned() };
        let line = line(&error.into());
        assert!(line.starts_with("cannot connect to 127.0.0.1:9092: Connection refused"), "{line}");
        assert!(line.contains("`sealane local` starts one"), "{line}");
        assert_eq!(line.lines().count(), 1);
    }

    #[test]
    fn a_refusal_of_control_is_its_message() {
        let error =
            anyhow::Error::new(tonic::Status::not_found("lane boe-x does not exist")).context("outer");
        assert_eq!(line(&error), "lane boe-x does not exist");
    }
}
