//! Why pods are not ready, in one reason and one sentence. Pure.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;

/// The worst that is wrong with any of these pods: a reason for a condition, and a sentence. `said` is what those that run say
/// themselves, by pod.
pub fn trouble(pods: &[Pod], said: &BTreeMap<String, String>) -> Option<(&'static str, String)> {
    let mut troubles: Vec<(usize, &'static str, String)> =
        pods.iter().filter_map(|pod| of_one(pod, said)).collect();
    troubles.sort();
    troubles.into_iter().next().map(|(_, reason, text)| (reason, text))
}

pub fn is_ready(pod: &Pod) -> bool {
    let conditions = pod.status.as_ref().and_then(|status| status.conditions.as_ref());
    pod.metadata.deletion_timestamp.is_none()
        && conditions
            .into_iter()
            .flatten()
            .any(|condition| condition.type_ == "Ready" && condition.status == "True")
}

fn of_one(pod: &Pod, said: &BTreeMap<String, String>) -> Option<(usize, &'static str, String)> {
    if is_ready(pod) {
        return None;
    }
    let name = pod.name_any();
    let status = pod.status.as_ref()?;
    let unscheduled = status
        .conditions
        .iter()
        .flatten()
        .find(|condition| condition.type_ == "PodScheduled" && condition.status == "False");
    if let Some(condition) = unscheduled {
        let why = condition.message.clone().unwrap_or_default();
        return Some((1, "Unschedulable", format!("pod {name} has no node: {why}")));
    }
    for container in status.container_statuses.iter().flatten() {
        let Some(waiting) = container.state.as_ref().and_then(|state| state.waiting.as_ref()) else {
            continue;
        };
        let why = waiting.message.clone().unwrap_or_default();
        match waiting.reason.as_deref().unwrap_or_default() {
            "ErrImagePull" | "ImagePullBackOff" | "InvalidImageName" | "ErrImageNeverPull" => {
                return Some((
                    0,
                    "ImageUnavailable",
                    format!("pod {name}: image {}: {why}", container.image),
                ));
            }
            "CreateContainerConfigError" => {
                return Some((2, "ConfigMissing", format!("pod {name}: {why}")));
            }
            "CrashLoopBackOff" => {
                let last = container.last_state.as_ref().and_then(|last| last.terminated.as_ref());
                let code = last.map_or(-1, |last| last.exit_code);
                let text =
                    format!("pod {name} ends with code {code}: kubectl logs {name} --previous says why");
                return Some((3, "CrashLooping", text));
            }
            _ => {}
        }
    }
    Some(match said.get(&name) {
        Some(said) => (4, "BrokerWaits", format!("pod {name}: {said}")),
        None => (5, "Starting", format!("pod {name} is not ready")),
    })
}
