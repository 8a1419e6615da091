//! What may go and what may not, case by case; and a small cluster that is rolled and scaled by chance, whose every step is
//! held against what would have been lost.

use proptest::prelude::*;

use super::*;

fn held(partitions: u32) -> Held {
    Held { partitions, taking_over: 0 }
}

/// Three brokers with four partitions each, all well.
fn three() -> Vec<Broker> {
    let all: BTreeMap<i32, Held> = (1..=3).map(|id| (id, held(4))).collect();
    (0..3)
        .map(|place| Broker {
            pool: "p".to_owned(),
            pod: pod_of("p", place),
            uid: format!("u{place}"),
            ready: true,
            answer: Some(Answer { id: place + 1, brokers: all.clone(), ..Answer::default() }),
            ..Broker::default()
        })
        .collect()
}

fn pool(wanted: i32, current: i32) -> Pool {
    Pool { name: "p".to_owned(), wanted, current: Some(current), emptied: BTreeMap::new() }
}

fn scene<'a>(pools: &'a [Pool], brokers: &'a [Broker]) -> Scene<'a> {
    Scene {
        pools,
        brokers,
        alone: false,
        policy: UpdatePolicy::Auto,
        max_unavailable: 1,
        approved: false,
        careless: false,
    }
}

fn answer(broker: &mut Broker) -> &mut Answer {
    broker.answer.as_mut().expect("it answers")
}

fn all_say(brokers: &mut [Broker], change: impl Fn(&mut Answer)) {
    brokers.iter_mut().filter_map(|broker| broker.answer.as_mut()).for_each(change);
}

#[test]
fn one_outdated_pod_is_restarted_at_a_time_and_the_last_goes_first() {
    let pools = [pool(3, 3)];
    let mut brokers = three();
    brokers.iter_mut().for_each(|broker| broker.outdated = true);
    let decision = decide(&scene(&pools, &brokers));
    let step = Step::Restart { pod: "p-2".to_owned(), uid: "u2".to_owned(), down: false };
    assert_eq!(decision.steps, [step]);
    assert_eq!(decision.plan.len(), 3, "{:?}", decision.plan);
}

#[test]
fn a_restart_waits_for_whatever_is_not_whole_and_says_for_what() {
    let pools = [pool(3, 3)];
    let refused = |change: &dyn Fn(&mut Vec<Broker>)| {
        let mut brokers = three();
        brokers[0].outdated = true;
        change(&mut brokers);
        let decision = decide(&scene(&pools, &brokers));
        assert_eq!(decision.steps, [], "{:?}", decision.plan);
        decision.plan.join("; ")
    };
    assert!(refused(&|all| all[1].ready = false).contains("pod p-1 is not ready"));
    assert!(refused(&|all| all[1].going = true).contains("pod p-1 is not ready"));
    assert!(refused(&|all| drop(all.remove(1))).contains("pod p-1 is not ready"));
    assert!(refused(&|all| all[2].answer = None).contains("p-2 is ready and does not answer"));
    assert!(refused(&|all| answer(&mut all[1]).unowned = 2).contains("2 partitions have no owner"));
    assert!(refused(&|all| answer(&mut all[1]).moving = 1).contains("1 partitions are on their way"));
    let taking = refused(&|all| {
        answer(&mut all[2]).brokers.insert(2, Held { partitions: 4, taking_over: 3 });
    });
    assert!(taking.contains("3 partitions are being taken over"), "{taking}");
    let gone = refused(&|all| answer(&mut all[1]).brokers.retain(|id, _| *id != 3));
    assert!(gone.contains("broker 3 of pod p-2 is not in the cluster, says pod p-1"), "{gone}");
    assert!(refused(&|all| answer(&mut all[1]).id = 1).contains("both say that they are broker 1"));
}

#[test]
fn a_bad_image_stops_at_one_pod_and_that_pod_alone_is_begun_anew_when_it_is_mended() {
    let pools = [pool(3, 3)];
    let mut brokers = three();
    // The last runs the bad image; the others would follow.
    (brokers[2].ready, brokers[2].answer) = (false, None);
    (brokers[0].outdated, brokers[1].outdated) = (true, true);
    assert_eq!(decide(&scene(&pools, &brokers)).steps, []);
    // The spec is as before: the last is the one that is outdated.
    (brokers[0].outdated, brokers[1].outdated, brokers[2].outdated) = (false, false, true);
    let step = Step::Restart { pod: "p-2".to_owned(), uid: "u2".to_owned(), down: true };
    assert_eq!(decide(&scene(&pools, &brokers)).steps, [step]);
}

#[test]
fn a_build_that_cannot_read_what_it_is_to_take_over_stops_the_roll_and_is_replaced_when_the_spec_is_mended() {
    let pools = [pool(3, 3)];
    let mut brokers = three();
    all_say(&mut brokers, |answer| answer.brokers.extend([(3, Held { partitions: 4, taking_over: 2 })]));
    (brokers[0].outdated, brokers[1].outdated) = (true, true);
    assert_eq!(decide(&scene(&pools, &brokers)).steps, [], "the others stay as they are");
    (brokers[0].outdated, brokers[1].outdated, brokers[2].outdated) = (false, false, true);
    let step = Step::Restart { pod: "p-2".to_owned(), uid: "u2".to_owned(), down: false };
    assert_eq!(decide(&scene(&pools, &brokers)).steps, [step]);
}

#[test]
fn a_broker_is_remembered_then_emptied_and_removed_when_nothing_is_left() {
    let mut pools = [pool(2, 3)];
    let mut brokers = three();
    let first = decide(&scene(&pools, &brokers));
    assert_eq!((first.replicas["p"], &first.steps[..]), (3, &[][..]));
    assert_eq!(first.emptied["p"], BTreeMap::from([("p-2".to_owned(), 3)]));

    pools[0].emptied = first.emptied["p"].clone();
    let drain = Step::Drain { pod: "p-2".to_owned(), id: 3 };
    assert_eq!(decide(&scene(&pools, &brokers)).steps, [drain]);

    all_say(&mut brokers, |answer| answer.draining.extend([3]));
    let waits = decide(&scene(&pools, &brokers));
    assert_eq!((waits.replicas["p"], waits.steps.len()), (3, 0));
    assert!(waits.plan[0].contains("4 partitions to give away"), "{:?}", waits.plan);

    all_say(&mut brokers, |answer| answer.brokers.extend([(3, held(0))]));
    // One of them has not heard yet.
    answer(&mut brokers[0]).brokers.insert(3, held(1));
    assert_eq!(decide(&scene(&pools, &brokers)).replicas["p"], 3);
    answer(&mut brokers[0]).brokers.insert(3, held(0));
    assert_eq!(decide(&scene(&pools, &brokers)).replicas["p"], 2);

    // Gone: its id is free to be used again, and then there is nothing to remember.
    pools[0].current = Some(2);
    brokers.truncate(2);
    assert_eq!(decide(&scene(&pools, &brokers)).steps, [], "its lease has not run out yet");
    all_say(&mut brokers, |answer| answer.brokers.retain(|id, _| *id != 3));
    assert_eq!(decide(&scene(&pools, &brokers)).steps, [Step::Undrain { id: 3 }]);
    all_say(&mut brokers, |answer| answer.draining.clear());
    let last = decide(&scene(&pools, &brokers));
    assert!(last.emptied["p"].is_empty() && last.steps.is_empty() && last.plan.is_empty(), "{last:?}");
}

#[test]
fn a_broker_that_is_wanted_again_takes_part_again_and_one_that_a_person_emptied_is_left_alone() {
    let mut pools = [pool(3, 3)];
    pools[0].emptied.insert("p-2".to_owned(), 3);
    let mut brokers = three();
    all_say(&mut brokers, |answer| answer.draining.extend([1, 3]));
    assert_eq!(decide(&scene(&pools, &brokers)).steps, [Step::Undrain { id: 3 }]);
}

#[test]
fn an_unclear_answer_removes_nothing() {
    let mut pools = [pool(2, 3)];
    pools[0].emptied.insert("p-2".to_owned(), 3);
    let kept = |change: &dyn Fn(&mut Vec<Broker>)| {
        let mut brokers = three();
        all_say(&mut brokers, |answer| {
            answer.draining.insert(3);
            answer.brokers.insert(3, held(0));
        });
        change(&mut brokers);
        let decision = decide(&scene(&pools, &brokers));
        assert_eq!(decision.replicas["p"], 3, "{:?}", decision.plan);
        decision.plan[0].clone()
    };
    assert!(kept(&|all| all[2].answer = None).contains("does not say which broker it is"));
    assert!(kept(&|all| all[0].answer = None).contains("pod p-0 is ready and does not answer"));
    assert!(kept(&|all| answer(&mut all[1]).id = 3).contains("pod p-1 says too"));
    assert!(kept(&|all| answer(&mut all[1]).unowned = 1).contains("being taken over"));
    let silent = kept(&|all| (all[2].ready, all[2].answer) = (false, None));
    assert!(silent.contains("broker 3 is alive and may be it"), "{silent}");
    let dark = kept(&|all| all.iter_mut().for_each(|broker| (broker.ready, broker.answer) = (false, None)));
    assert!(dark.contains("no broker answers"), "{dark}");
}

#[test]
fn a_pod_that_never_became_a_broker_is_removed() {
    let pools = [pool(3, 4)];
    let mut brokers = three();
    let pod = pod_of("p", 3);
    brokers.push(Broker { pool: "p".to_owned(), pod, ..Broker::default() });
    assert_eq!(decide(&scene(&pools, &brokers)).replicas["p"], 3);
}

#[test]
fn a_pod_on_a_lost_node_is_struck_off_when_its_broker_is_not_in_the_cluster_any_more() {
    let pools = [pool(3, 3)];
    let mut brokers = three();
    (brokers[1].ready, brokers[1].going, brokers[1].overdue, brokers[1].answer) = (false, true, true, None);
    let decision = decide(&scene(&pools, &brokers));
    assert_eq!(decision.steps, []);
    assert!(decision.plan[0].contains("broker 2 is alive and may be it"), "{:?}", decision.plan);
    all_say(&mut brokers, |answer| answer.brokers.retain(|id, _| *id != 2));
    let step = Step::Abandon { pod: "p-1".to_owned(), uid: "u1".to_owned() };
    assert_eq!(decide(&scene(&pools, &brokers)).steps, [step]);
    let alone = Scene { alone: true, ..scene(&pools, &brokers) };
    assert_eq!(decide(&alone).steps, [], "its volume may be in use");
    all_say(&mut brokers, |answer| answer.unowned = 1);
    assert_eq!(decide(&scene(&pools, &brokers)).steps, []);
}

#[test]
fn a_plan_waits_for_leave_and_a_person_who_deletes_pods_is_told_which() {
    let pools = [pool(3, 3)];
    let mut brokers = three();
    brokers[1].outdated = true;
    let steps = |policy, approved| {
        let decision = decide(&Scene { policy, approved, ..scene(&pools, &brokers) });
        (decision.steps.len(), decision.plan.len())
    };
    assert_eq!(steps(UpdatePolicy::Plan, false), (0, 1));
    assert_eq!(steps(UpdatePolicy::Plan, true), (1, 1));
    assert_eq!(steps(UpdatePolicy::OnDelete, true), (0, 1));
}

#[test]
fn a_cluster_that_is_to_have_no_broker_is_not_emptied_first() {
    assert_eq!(decide(&scene(&[pool(0, 3)], &three())).replicas["p"], 0);
    let (pools, brokers) = ([pool(0, 1)], three());
    let alone = Scene { alone: true, ..scene(&pools, &brokers[..1]) };
    assert_eq!(decide(&alone).replicas["p"], 0);
    // Who was being emptied just then may be back, and is to take part again.
    let (pools, mut brokers) = ([Pool { emptied: [("p-2".to_owned(), 3)].into(), ..pool(0, 3) }], three());
    all_say(&mut brokers, |answer| answer.draining = [3].into());
    let decision = decide(&scene(&pools, &brokers));
    assert_eq!((decision.replicas["p"], decision.steps), (3, vec![Step::Undrain { id: 3 }]));
    all_say(&mut brokers, |answer| answer.draining.clear());
    let decision = decide(&scene(&pools, &brokers));
    assert_eq!((decision.replicas["p"], decision.emptied["p"].len()), (0, 0));
}

/// A cluster as a model: brokers by place, partitions by owner, at most one change of hands at a time.
#[derive(Debug)]
struct Model {
    wanted: i32,
    current: i32,
    emptied: BTreeMap<String, i32>,
    /// By place: id, whether it is ready and registered, whether it is outdated.
    pods: BTreeMap<i32, (i32, bool, bool)>,
    /// Owner, or none; and whether he serves it.
    partitions: Vec<(Option<i32>, bool)>,
    draining: BTreeSet<i32>,
    /// Nobody is asked: every broker is taken to serve nothing, and the cluster to be whole.
    careless: bool,
}

impl Model {
    fn new(begin: i32, wanted: i32, outdated: &[bool]) -> Model {
        let pods = (0..begin).map(|place| (place, (place + 1, true, outdated[place as usize]))).collect();
        Model {
            wanted,
            current: begin,
            emptied: BTreeMap::new(),
            pods,
            partitions: (0..7).map(|number| (Some(number % begin + 1), true)).collect(),
            draining: BTreeSet::new(),
            careless: false,
        }
    }

    fn alive(&self) -> Vec<i32> {
        self.pods.values().filter(|pod| pod.1).map(|pod| pod.0).collect()
    }

    fn brokers(&self) -> Vec<Broker> {
        let count = |id: i32, served: bool| {
            self.partitions.iter().filter(|p| p.0 == Some(id) && (!served || !p.1)).count() as u32
        };
        let held = |id| Held { partitions: count(id, false), taking_over: count(id, true) };
        let brokers: BTreeMap<i32, Held> = self.alive().into_iter().map(|id| (id, held(id))).collect();
        let unowned = self.partitions.iter().filter(|p| p.0.is_none()).count() as u32;
        let said =
            |id| Answer { id, brokers: brokers.clone(), unowned, moving: 0, draining: self.draining.clone() };
        let broker = |(place, (id, ready, outdated)): (&i32, &(i32, bool, bool))| Broker {
            pool: "p".to_owned(),
            pod: pod_of("p", *place),
            uid: place.to_string(),
            ready: *ready,
            outdated: *outdated,
            going: false,
            overdue: false,
            answer: ready.then(|| said(*id)),
        };
        self.pods.iter().map(broker).collect()
    }

    fn lose(&mut self, place: i32) {
        let id = self.pods[&place].0;
        self.partitions.iter_mut().filter(|p| p.0 == Some(id)).for_each(|p| *p = (None, false));
    }

    /// One thing happens by itself.
    fn happen(&mut self, dice: u32) {
        let alive: Vec<i32> = self.alive().into_iter().filter(|id| !self.draining.contains(id)).collect();
        let pick = |count: usize| dice as usize % count.max(1);
        match dice % 4 {
            0 => {
                let down: Vec<i32> =
                    self.pods.iter().filter(|(_, pod)| !pod.1).map(|(place, _)| *place).collect();
                if let Some(pod) = down.get(pick(down.len())).and_then(|place| self.pods.get_mut(place)) {
                    pod.1 = true;
                }
            }
            1 if !alive.is_empty() => {
                let heir = alive[pick(alive.len())];
                if let Some(free) = self.partitions.iter_mut().find(|p| p.0.is_none()) {
                    *free = (Some(heir), false);
                }
            }
            2 => {
                if let Some(taken) = self.partitions.iter_mut().find(|p| !p.1 && p.0.is_some()) {
                    taken.1 = true;
                }
            }
            _ if !alive.is_empty() => {
                let (heir, draining) = (alive[pick(alive.len())], self.draining.clone());
                let given =
                    self.partitions.iter_mut().find(|p| p.1 && p.0.is_some_and(|id| draining.contains(&id)));
                if let Some(given) = given {
                    *given = (Some(heir), false);
                }
            }
            _ => {}
        }
    }

    /// What the operator and the StatefulSet do after a look. Panics where somebody is hurt.
    fn act(&mut self) {
        let pools = [Pool {
            name: "p".to_owned(),
            wanted: self.wanted,
            current: Some(self.current),
            emptied: self.emptied.clone(),
        }];
        let mut brokers = self.brokers();
        if self.careless {
            all_say(&mut brokers, |answer| {
                answer.unowned = 0;
                answer.brokers.values_mut().for_each(|held| *held = Held::default());
            });
        }
        let decision = decide(&scene(&pools, &brokers));
        let replicas = decision.replicas["p"];
        assert!(replicas >= self.current - 1, "one at a time");
        self.emptied = decision.emptied["p"].clone();
        for place in replicas..self.current {
            let (id, ready, _) = self.pods.remove(&place).expect("it was there");
            let left = self.partitions.iter().filter(|p| p.0 == Some(id)).count();
            assert_eq!(left, 0, "broker {id} (ready: {ready}) was removed with {left} partitions");
        }
        for place in self.current..replicas {
            self.pods.insert(place, (place + 1, false, false));
        }
        self.current = replicas;
        for step in decision.steps {
            match step {
                Step::Restart { pod, .. } => {
                    let at = place(&pod);
                    let only = self.pods.values().filter(|pod| pod.2).count() == 1;
                    let own = |p: &(Option<i32>, bool)| only && p.0 == Some(self.pods[&at].0);
                    let whole = self.partitions.iter().all(|p| (p.0.is_some() && p.1) || own(p));
                    let others = self.pods.iter().all(|(place, pod)| *place == at || pod.1);
                    let down = !self.pods[&at].1;
                    assert!(down || (whole && others), "{pod} was restarted at {self:?}");
                    self.lose(at);
                    let pod = self.pods.get_mut(&at).expect("it is there");
                    (pod.1, pod.2) = (false, false);
                }
                Step::Abandon { .. } => unreachable!("no node is lost here"),
                Step::Drain { id, .. } => self.draining.extend([id]),
                Step::Undrain { id } => self.draining.retain(|kept| *kept != id),
            }
        }
    }
}

#[test]
fn twin_that_does_not_ask_what_brokers_hold_hurts_somebody() {
    let hurt = |seed: u32| {
        let outdated: Vec<bool> = (0..5).map(|bit| seed >> bit & 1 == 1).collect();
        let mut model = Model::new(4, 2 + (seed % 3) as i32, &outdated);
        model.careless = true;
        (0..60u32).for_each(|round| {
            model.happen(seed.wrapping_add(round).wrapping_mul(2_654_435_761) >> 7);
            model.act();
        });
    };
    let count = (0..64).filter(|seed| std::panic::catch_unwind(|| hurt(*seed)).is_err()).count();
    assert!(count > 32, "only {count} of 64 clusters were hurt");
}

proptest! {
    #[test]
    fn whatever_happens_nobody_goes_who_is_needed_and_in_the_end_all_is_as_it_was_asked(
        begin in 1..5i32,
        wanted in 1..6i32,
        outdated in prop::collection::vec(any::<bool>(), 5),
        dice in prop::collection::vec((any::<u32>(), any::<bool>()), 0..120),
    ) {
        let mut model = Model::new(begin, wanted, &outdated);
        for (dice, acts) in dice {
            model.happen(dice);
            if acts {
                model.act();
            }
        }
        // Left to itself it comes to rest.
        for round in 0..2_000u32 {
            model.happen(round.wrapping_mul(2_654_435_761) >> 7);
            model.act();
        }
        prop_assert_eq!(model.current, wanted);
        prop_assert!(model.pods.values().all(|pod| pod.1 && !pod.2), "{:?}", &model);
        prop_assert!(model.draining.is_empty() && model.emptied.is_empty(), "{:?}", &model);
        prop_assert!(model.partitions.iter().all(|p| p.0.is_some() && p.1), "{:?}", &model);
    }
}
