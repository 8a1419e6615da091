//! Which broker is restarted, emptied or let go next, and why not yet. Pure.
//!
//! The data plane is asked, never guessed: every broker that is ready must answer, and each answer must say that all
//! partitions have an owner who serves them, before one more broker may go. Who leaves a pool gives away first what it
//! owns, and is known by the id that it reports itself. An answer that is missing or unclear lets nothing go.

use std::collections::{BTreeMap, BTreeSet};

use crate::crd::UpdatePolicy;

/// A pod, and what its broker says.
#[derive(Clone, Debug, Default)]
pub struct Broker {
    pub pool: String,
    pub pod: String,
    pub uid: String,
    pub ready: bool,
    /// It is being deleted.
    pub going: bool,
    /// It should have ended long ago: nobody on its node says that it has.
    pub overdue: bool,
    /// It runs another revision than its StatefulSet asks for.
    pub outdated: bool,
    pub answer: Option<Answer>,
}

/// What a broker says of itself and of its cluster.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Answer {
    pub id: i32,
    pub brokers: BTreeMap<i32, Held>,
    pub unowned: u32,
    pub moving: u32,
    pub draining: BTreeSet<i32>,
}

/// Partitions of a broker.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Held {
    pub partitions: u32,
    /// Of those, not served yet.
    pub taking_over: u32,
}

/// A pool as it is and as it shall be.
#[derive(Clone, Debug, Default)]
pub struct Pool {
    pub name: String,
    pub wanted: i32,
    /// Of its StatefulSet; none where there is none yet.
    pub current: Option<i32>,
    /// Brokers that the operator empties, by pod: remembered until they are needed again or gone.
    pub emptied: BTreeMap<String, i32>,
}

pub struct Scene<'a> {
    pub pools: &'a [Pool],
    pub brokers: &'a [Broker],
    /// One broker that keeps its data: nobody could take over from it.
    pub alone: bool,
    pub policy: UpdatePolicy,
    pub max_unavailable: i32,
    /// With policy Plan: a person has agreed to this very update.
    pub approved: bool,
    /// Nobody is asked: for tests that show what asking is good for.
    pub careless: bool,
}

#[derive(Clone, Debug, PartialEq)]
pub enum Step {
    /// `down`: it serves nobody, so no budget of disruptions is asked.
    Restart {
        pod: String,
        uid: String,
        down: bool,
    },
    /// Its node is lost: it is struck off, so that another may take its place.
    Abandon {
        pod: String,
        uid: String,
    },
    Drain {
        pod: String,
        id: i32,
    },
    Undrain {
        id: i32,
    },
}

/// What follows.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Decision {
    /// Replicas of each pool's StatefulSet.
    pub replicas: BTreeMap<String, i32>,
    pub emptied: BTreeMap<String, BTreeMap<String, i32>>,
    pub steps: Vec<Step>,
    /// What is to be done and why it is not done yet, a line each.
    pub plan: Vec<String>,
    /// Something waits for a person.
    pub waits: bool,
}

pub fn decide(scene: &Scene<'_>) -> Decision {
    let mut decision = Decision::default();
    let mut shrinks = false;
    for pool in scene.pools {
        decision.emptied.insert(pool.name.clone(), scene.remembered(pool, &mut decision.steps));
        let current = pool.current.unwrap_or(pool.wanted);
        let mut replicas = current.max(pool.wanted);
        if current > pool.wanted {
            // One pool, one broker at a time.
            if !std::mem::replace(&mut shrinks, true) {
                replicas = scene.shrink(pool, current, &mut decision);
            } else {
                decision.plan.push(format!("pool {} waits for its turn to become smaller", pool.name));
            }
        }
        decision.replicas.insert(pool.name.clone(), replicas);
    }
    scene.abandon(&mut decision);
    scene.restart(shrinks, &mut decision);
    decision
}

/// Name of a pod by its place.
pub fn pod_of(pool: &str, place: i32) -> String {
    format!("{pool}-{place}")
}

/// How safe the data are: a reason, a sentence; and whether, or that nobody says so.
pub fn safety(brokers: &[Broker]) -> (Option<bool>, &'static str, String) {
    let answers: Vec<&Answer> = brokers.iter().filter_map(|broker| broker.answer.as_ref()).collect();
    if answers.is_empty() {
        return (None, "NoAnswer", "no broker answers".to_owned());
    }
    let most = |of: fn(&Answer) -> u32| answers.iter().map(|answer| of(answer)).max().unwrap_or(0);
    let (unowned, taking) = (most(|answer| answer.unowned), most(|answer| answer.taking_over(None)));
    match (unowned, taking) {
        (0, 0) => (Some(true), "Safe", "every partition is served by its owner".to_owned()),
        (0, taking) => (Some(false), "TakingOver", format!("{taking} partitions are being taken over")),
        (unowned, _) => (Some(false), "Unowned", format!("{unowned} partitions have no owner")),
    }
}

impl Answer {
    /// Partitions that are not served yet, but for those of one broker.
    fn taking_over(&self, but: Option<i32>) -> u32 {
        let others = self.brokers.iter().filter(|(id, _)| Some(**id) != but);
        others.map(|(_, held)| held.taking_over).sum()
    }
}

impl Scene<'_> {
    fn answers(&self) -> impl Iterator<Item = (&Broker, &Answer)> {
        self.brokers.iter().filter_map(|broker| Some((broker, broker.answer.as_ref()?)))
    }

    /// The cluster is to have no broker at all.
    fn is_to_be_empty(&self) -> bool {
        self.pools.iter().all(|pool| pool.wanted == 0)
    }

    fn broker(&self, pod: &str) -> Option<&Broker> {
        self.brokers.iter().find(|broker| broker.pod == pod)
    }

    /// What of a pool's emptied brokers is still to be remembered; those that are wanted again, or gone, take part again.
    fn remembered(&self, pool: &Pool, steps: &mut Vec<Step>) -> BTreeMap<String, i32> {
        let mut kept = BTreeMap::new();
        let leaving: BTreeSet<String> =
            (pool.wanted..pool.current.unwrap_or(0)).map(|place| pod_of(&pool.name, place)).collect();
        for (pod, id) in &pool.emptied {
            let drains = self.answers().any(|(_, answer)| answer.draining.contains(id));
            let alive = self.answers().any(|(_, answer)| answer.brokers.contains_key(id));
            let silent = self.answers().next().is_none();
            if silent || (leaving.contains(pod) && !self.is_to_be_empty()) {
                kept.insert(pod.clone(), *id);
            } else if drains {
                kept.insert(pod.clone(), *id);
                let wanted = (0..pool.wanted).any(|place| pod_of(&pool.name, place) == *pod);
                // Where nobody is to be left, nobody leaves as one who gave away: he may be back as he was.
                if wanted || !alive || self.is_to_be_empty() {
                    steps.push(Step::Undrain { id: *id });
                }
            }
        }
        kept
    }

    /// Replicas of a pool that has one broker too many at least.
    fn shrink(&self, pool: &Pool, current: i32, decision: &mut Decision) -> i32 {
        if self.alone || self.careless {
            return pool.wanted;
        }
        if self.is_to_be_empty() {
            let kept = decision.emptied.get(&pool.name).is_some_and(|emptied| !emptied.is_empty());
            if !kept || self.answers().next().is_none() {
                return pool.wanted;
            }
            decision.plan.push(format!("pool {} waits: brokers of it are still kept empty", pool.name));
            return current;
        }
        let pod = pod_of(&pool.name, current - 1);
        match self.leave(pool, &pod) {
            Leave::Go => current - 1,
            Leave::Remember(id) => {
                if let Some(emptied) = decision.emptied.get_mut(&pool.name) {
                    emptied.insert(pod.clone(), id);
                }
                decision.plan.push(format!("pod {pod}, broker {id}, is to be emptied and removed"));
                current
            }
            Leave::Drain(id) => {
                decision.plan.push(format!("pod {pod}, broker {id}, is to be emptied and removed"));
                decision.steps.push(Step::Drain { pod, id });
                current
            }
            Leave::Wait(why) => {
                decision.plan.push(format!("pod {pod} is not removed yet: {why}"));
                current
            }
        }
    }

    /// What comes next for the broker that leaves.
    fn leave(&self, pool: &Pool, pod: &str) -> Leave {
        let found = self.broker(pod);
        let Some((broker, answer)) = found.and_then(|found| Some((found, found.answer.as_ref()?))) else {
            return self.leave_silently(found);
        };
        let id = answer.id;
        if let Some(twin) = self.answers().find(|(other, said)| other.pod != broker.pod && said.id == id) {
            return Leave::Wait(format!("pod {} says too that it is broker {id}", twin.0.pod));
        }
        // Remembered first, so that an operator that ends here leaves nobody drained for ever.
        if pool.emptied.get(pod) != Some(&id) {
            return Leave::Remember(id);
        }
        if let Some(silent) = self.silent(Some(pod)) {
            return Leave::Wait(format!("pod {silent} is ready and does not answer"));
        }
        let mut left = 0;
        for (_, answer) in self.answers() {
            if !answer.draining.contains(&id) {
                return Leave::Drain(id);
            }
            let Some(held) = answer.brokers.get(&id) else {
                return Leave::Wait(format!("broker {id} answers and is not in the cluster"));
            };
            left = left.max(held.partitions);
            if answer.unowned > 0 || answer.taking_over(None) > 0 {
                return Leave::Wait("partitions are being taken over".to_owned());
            }
        }
        match left {
            0 => Leave::Go,
            left => Leave::Wait(format!("broker {id} has {left} partitions to give away")),
        }
    }

    /// A pod whose broker does not say who it is may go where all brokers that are alive are other pods'.
    fn leave_silently(&self, found: Option<&Broker>) -> Leave {
        if found.is_some_and(|broker| broker.ready) {
            return Leave::Wait("it is ready and does not say which broker it is".to_owned());
        }
        let ids: BTreeSet<i32> = self.answers().map(|(_, answer)| answer.id).collect();
        if ids.is_empty() {
            return Leave::Wait("no broker answers, so what it holds is not known".to_owned());
        }
        for (other, answer) in self.answers() {
            if let Some(id) = answer.brokers.keys().find(|id| !ids.contains(id)) {
                return Leave::Wait(format!("broker {id} is alive and may be it, says pod {}", other.pod));
            }
            if answer.unowned > 0 || answer.taking_over(None) > 0 {
                return Leave::Wait(format!("partitions are being taken over, says pod {}", other.pod));
            }
        }
        Leave::Go
    }

    /// A pod whose node is lost may live on, unseen; where all agree that its broker does not, the store refuses whatever
    /// it still writes. A broker that keeps its own data is never struck off: its volume may be in use.
    fn abandon(&self, decision: &mut Decision) {
        for broker in self.brokers.iter().filter(|broker| broker.going && broker.overdue) {
            let refused = match (self.alone, broker.answer.is_some(), self.leave_silently(None)) {
                (true, ..) => Some("it may still use its volume; look at its node".to_owned()),
                (_, true, _) => Some("its broker answers".to_owned()),
                (.., Leave::Wait(why)) => Some(why),
                _ => None,
            };
            let pod = broker.pod.clone();
            match refused {
                Some(why) => {
                    decision.plan.push(format!("pod {pod} does not end and is not struck off: {why}"))
                }
                None => {
                    decision
                        .plan
                        .push(format!("pod {pod} is struck off: nobody on its node says that it has ended"));
                    decision.steps.push(Step::Abandon { pod, uid: broker.uid.clone() });
                }
            }
        }
    }

    fn silent(&self, but: Option<&str>) -> Option<&str> {
        let silent = self
            .brokers
            .iter()
            .find(|broker| broker.ready && broker.answer.is_none() && Some(broker.pod.as_str()) != but);
        silent.map(|broker| broker.pod.as_str())
    }

    fn restart(&self, shrinks: bool, decision: &mut Decision) {
        let mut outdated: Vec<&Broker> =
            self.brokers.iter().filter(|broker| broker.outdated && !broker.going).collect();
        // Those that serve nobody first, then from the last to the first, as a StatefulSet would.
        outdated.sort_by_key(|broker| (broker.ready, &broker.pool, std::cmp::Reverse(place(&broker.pod))));
        let mut restarted = 0;
        for broker in outdated {
            let pod = &broker.pod;
            let refused = match self.policy {
                UpdatePolicy::OnDelete => Some("spec.update.policy is OnDelete: delete it".to_owned()),
                UpdatePolicy::Plan if !self.approved => Some("nobody has approved the plan".to_owned()),
                _ if self.careless => None,
                _ if restarted > 0 => Some("another pod is restarted first".to_owned()),
                _ if broker.ready && shrinks => Some("a pool becomes smaller first".to_owned()),
                _ => self.why_not(broker),
            };
            decision.waits |= self.policy == UpdatePolicy::OnDelete
                || (self.policy == UpdatePolicy::Plan && !self.approved);
            match refused {
                Some(why) => decision.plan.push(format!("pod {pod} is to be restarted: {why}")),
                None => {
                    restarted += 1;
                    decision.plan.push(format!("pod {pod} is restarted now"));
                    let (pod, uid) = (pod.clone(), broker.uid.clone());
                    let down = !broker.ready || self.careless;
                    decision.steps.push(Step::Restart { pod, uid, down });
                }
            }
        }
    }

    /// Why this broker must not be away now.
    pub fn why_not(&self, broker: &Broker) -> Option<String> {
        // It is away already, and what it owned has another owner or waits for it.
        if !broker.ready && broker.answer.is_none() {
            return None;
        }
        let wanted = self.pools.iter().flat_map(|pool| {
            (0..pool.current.unwrap_or(0).max(pool.wanted)).map(|place| pod_of(&pool.name, place))
        });
        let away: Vec<String> = wanted
            .filter(|pod| *pod != broker.pod)
            .filter(|pod| self.broker(pod).is_none_or(|other| !other.ready || other.going))
            .collect();
        if away.len() >= usize::try_from(self.max_unavailable.max(1)).unwrap_or(1) {
            return Some(format!("pod {} is not ready", away.first()?));
        }
        if let Some(silent) = self.silent(None) {
            return Some(format!("pod {silent} is ready and does not answer"));
        }
        let own = broker.answer.as_ref().map(|answer| answer.id);
        // What it takes over itself cannot be waited for where it is not ready, nor where it may never be done: where this
        // one alone is to be begun anew, its build may not read what another has written.
        let hopeless = !broker.ready || self.brokers.iter().filter(|other| other.outdated).count() == 1;
        let mut ids = BTreeMap::new();
        for (other, answer) in self.answers().filter(|(other, _)| other.ready) {
            if let Some(twin) = ids.insert(answer.id, &other.pod) {
                return Some(format!(
                    "pods {twin} and {} both say that they are broker {}",
                    other.pod, answer.id
                ));
            }
        }
        for (other, answer) in self.answers() {
            if let Some((id, pod)) = ids.iter().find(|(id, _)| !answer.brokers.contains_key(id)) {
                return Some(format!(
                    "broker {id} of pod {pod} is not in the cluster, says pod {}",
                    other.pod
                ));
            }
            let taking = answer.taking_over(own.filter(|_| hopeless));
            for (count, what) in [
                (answer.unowned, "have no owner"),
                (taking, "are being taken over"),
                (answer.moving, "are on their way to another broker"),
            ] {
                if count > 0 {
                    return Some(format!("{count} partitions {what}, says pod {}", other.pod));
                }
            }
        }
        None
    }
}

enum Leave {
    Go,
    Remember(i32),
    Drain(i32),
    Wait(String),
}

fn place(pod: &str) -> i32 {
    pod.rsplit_once('-').and_then(|(_, place)| place.parse().ok()).unwrap_or(-1)
}

#[cfg(test)]
#[path = "roll_tests.rs"]
mod tests;
