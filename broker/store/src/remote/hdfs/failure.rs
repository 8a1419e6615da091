//! What an error of HDFS means for the one who asked.

use hdfs_native::HdfsError;

use crate::StoreError;
use crate::remote::worker::one_line;

/// By what can be done next. Texts name the place and what was being done.
#[derive(Debug)]
pub(super) enum Failure {
    /// The file, or a directory above it.
    Missing(String),
    Exists,
    Full,
    /// The NameNode does not serve, or not yet: the same again may succeed.
    NameNode(String),
    Other(String),
}

impl Failure {
    pub(super) fn of(doing: &str, error: &HdfsError) -> Failure {
        match error {
            HdfsError::FileNotFound(_) => Failure::Missing(format!("{doing}: {}", first_line(error))),
            HdfsError::AlreadyExists(_) => Failure::Exists,
            HdfsError::IOError(_) => Failure::NameNode(format!("{doing}: {}", first_line(error))),
            HdfsError::RPCError(class, _) | HdfsError::FatalRPCError(class, _) => {
                Failure::of_class(class, doing, &first_line(error))
            }
            _ => Failure::Other(format!("{doing}: {}", first_line(error))),
        }
    }

    fn of_class(class: &str, doing: &str, text: &str) -> Failure {
        let name = class.rsplit(['.', '$']).next().unwrap_or_default();
        match name {
            "FileNotFoundException" => Failure::Missing(format!("{doing}: {text}")),
            "FileAlreadyExistsException" | "AlreadyBeingCreatedException" => Failure::Exists,
            "DSQuotaExceededException"
            | "NSQuotaExceededException"
            | "QuotaByStorageTypeExceededException" => Failure::Full,
            "SafeModeException" => Failure::NameNode(format!(
                "{doing}: the NameNode is in safe mode; waiting for it to leave it"
            )),
            "RetriableException" | "StandbyException" | "ServerTooBusyException" => {
                Failure::NameNode(format!("{doing}: {text}"))
            }
            "AccessControlException" | "AuthorizationException" => Failure::Other(format!(
                "{doing}: denied: check the user and the owner of the directory: {text}"
            )),
            _ => Failure::Other(format!("{doing}: {text}")),
        }
    }

    pub(super) fn text(&self) -> String {
        match self {
            Failure::Missing(text) | Failure::NameNode(text) | Failure::Other(text) => text.clone(),
            Failure::Exists => StoreError::AlreadyExists.to_string(),
            Failure::Full => StoreError::Full.to_string(),
        }
    }
}

/// Errors of a NameNode end in a Java stack.
fn first_line(error: &HdfsError) -> String {
    let text = error.to_string();
    one_line(text.split("\n\tat ").next().unwrap_or_default())
}

impl From<Failure> for StoreError {
    fn from(failure: Failure) -> StoreError {
        match failure {
            Failure::Missing(_) => StoreError::NotFound,
            Failure::Exists => StoreError::AlreadyExists,
            Failure::Full => StoreError::Full,
            Failure::NameNode(text) | Failure::Other(text) => StoreError::Io(text),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_of_a_name_node_is_one_line_without_its_stack() {
        let stack =
            "Parent directory doesn't exist: /c/wal\n\tat org.apache.hadoop.A.b(A.java:1)\n\tat java.lang.T";
        let error = HdfsError::RPCError("java.io.FileNotFoundException".to_owned(), stack.to_owned());
        let Failure::Missing(text) = Failure::of("create x", &error) else { panic!("a missing directory") };
        assert!(text.starts_with("create x: ") && text.ends_with("doesn't exist: /c/wal"), "{text}");
        let safe = "org.apache.hadoop.hdfs.server.namenode.SafeModeException";
        let error =
            HdfsError::RPCError(safe.to_owned(), "Cannot create file. Name node is in safe mode.".to_owned());
        assert!(
            matches!(Failure::of("create x", &error), Failure::NameNode(text) if text.contains("safe mode"))
        );
    }
}
