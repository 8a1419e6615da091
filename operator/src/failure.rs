//! Why a reconciliation did not come to its end, and so what happens next.

/// The end of a reconciliation that was cut short.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    #[error("the API server: {0}")]
    Kube(#[source] Box<kube::Error>),
    /// Another operator may be writing: nothing is written any more.
    #[error("this operator does not hold the Lease")]
    NotLeader,
    /// An object of that name is there and is not ours. Left as it is.
    #[error("{kind} {name} exists and {why}; rename or delete it")]
    Foreign { kind: String, name: String, why: String },
    #[error("{0}")]
    DataPlane(String),
    #[error("{0}")]
    Invalid(String),
}

impl From<kube::Error> for Failure {
    fn from(error: kube::Error) -> Failure {
        Failure::Kube(Box::new(error))
    }
}

impl Failure {
    fn code(&self) -> Option<u16> {
        match self {
            Failure::Kube(error) => match &**error {
                kube::Error::Api(status) => Some(status.code),
                _ => None,
            },
            _ => None,
        }
    }

    /// Somebody else changed the object meanwhile: look again.
    pub fn is_conflict(&self) -> bool {
        self.code() == Some(409)
    }

    pub fn is_not_found(&self) -> bool {
        self.code() == Some(404)
    }

    pub fn is_forbidden(&self) -> bool {
        self.code() == Some(403)
    }

    /// Nothing can be made in a namespace that goes.
    pub fn is_of_a_namespace_that_goes(&self) -> bool {
        let Failure::Kube(error) = self else { return false };
        let kube::Error::Api(status) = &**error else { return false };
        let causes = status.details.iter().flat_map(|details| &details.causes);
        status.code == 403 && causes.into_iter().any(|cause| cause.reason == "NamespaceTerminating")
    }

    /// Too many at a time: of requests, or of pods that a budget keeps.
    pub fn is_refused_for_now(&self) -> bool {
        self.code() == Some(429)
    }

    /// What the API server says about an object that it does not take.
    pub fn is_invalid(&self) -> bool {
        matches!(self.code(), Some(400 | 422))
    }
}
