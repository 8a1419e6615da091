//! Whole fleets against one group, on virtual time: members join, leave, crash, come back under
//! their instance, lose answers; stores are slow or fail; the coordinator restarts.
//!
//! One seed per run. Checked: a live member is never told UNKNOWN_MEMBER_ID, partitions of one
//! generation never have two holders, every request is answered, and a quiet fleet ends stable
//! with every partition held once.

use std::collections::{BTreeMap, BTreeSet, BinaryHeap, HashMap};

use super::*;

const PARTITIONS: i32 = 7;
const SESSION: Duration = Duration::from_secs(10);
const REBALANCE: Duration = Duration::from_secs(30);
const HEARTBEAT: Duration = Duration::from_secs(3);
const RETRY: Duration = Duration::from_secs(4);

#[derive(Clone, Debug, PartialEq)]
enum Phase {
    Off,
    Joining,
    Syncing,
    Stable,
}

#[derive(Clone, Debug)]
struct Client {
    phase: Phase,
    /// Counts lives and requests: an answer to an older one is not listened to.
    life: u64,
    member: Option<MemberId>,
    instance: Option<InstanceId>,
    generation: i32,
    held: BTreeSet<i32>,
    /// The coordinator restarted and may rightly not know this member.
    excused: bool,
}

#[derive(Clone, Debug)]
enum Event {
    Join(usize, u64),
    Sync(usize, u64, Vec<(MemberId, Bytes)>),
    Heartbeat(usize, u64),
    /// With the coordinator's life that gave it.
    JoinAnswer(usize, u64, JoinReply, u64),
    SyncAnswer(usize, u64, SyncReply),
    HeartbeatAnswer(usize, u64, ErrorCode),
    /// No answer came: the client begins again with JoinGroup.
    Retry(usize, u64),
    Stored(u64, StoreToken, Box<GroupMetadata>),
    Chaos,
}

struct World {
    seed: u64,
    random: u64,
    at: Duration,
    events: BinaryHeap<std::cmp::Reverse<(Duration, u64)>>,
    payload: HashMap<u64, Event>,
    sequence: u64,
    group: Group,
    /// Lives of the coordinator.
    reign: u64,
    durable: Option<GroupMetadata>,
    clients: Vec<Client>,
    open: BTreeMap<Ticket, (usize, u64)>,
    holders: BTreeMap<(i32, i32), String>,
    ids: u64,
    quiet: bool,
    rebalances: u64,
}

impl World {
    fn new(seed: u64) -> World {
        let mut world = World {
            seed,
            random: seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1,
            at: Duration::ZERO,
            events: BinaryHeap::new(),
            payload: HashMap::new(),
            sequence: 0,
            group: Group::new(GroupId::new("g"), rules(), now(Duration::ZERO)),
            reign: 0,
            durable: None,
            clients: Vec::new(),
            open: BTreeMap::new(),
            holders: BTreeMap::new(),
            ids: 0,
            quiet: false,
            rebalances: 0,
        };
        for i in 0..2 + world.below(6) {
            let instance = (world.below(3) == 0).then(|| InstanceId::new(&format!("i{i}")));
            world.clients.push(Client {
                phase: Phase::Off,
                life: 0,
                member: None,
                instance,
                generation: -1,
                held: BTreeSet::new(),
                excused: false,
            });
        }
        world.after(Duration::ZERO, Event::Chaos);
        world
    }

    fn below(&mut self, limit: u64) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random % limit
    }

    fn after(&mut self, delay: Duration, event: Event) {
        self.sequence += 1;
        self.events.push(std::cmp::Reverse((self.at + delay, self.sequence)));
        self.payload.insert(self.sequence, event);
    }

    fn travel(&mut self, event: Event) {
        let delay = Duration::from_millis(1 + self.below(300));
        self.after(delay, event);
    }

    fn run_until(&mut self, end: Duration) {
        loop {
            let event = self.events.peek().map(|e| e.0.0);
            let timer = self.group.next_deadline();
            let next = [event, timer].into_iter().flatten().min();
            let Some(next) = next.filter(|next| *next <= end) else { break };
            self.at = self.at.max(next);
            if timer == Some(next) {
                let effects = self.group.tick(now(self.at));
                self.act(effects);
            } else if let Some(std::cmp::Reverse((_, sequence))) = self.events.pop() {
                let event = self.payload.remove(&sequence).expect("every event has a payload");
                self.happen(event);
            }
        }
        self.at = end;
    }

    fn happen(&mut self, event: Event) {
        match event {
            Event::Join(i, life) => self.deliver_join(i, life),
            Event::Sync(i, life, assignments) => self.deliver_sync(i, life, assignments),
            Event::Heartbeat(i, life) => self.deliver_heartbeat(i, life),
            Event::JoinAnswer(i, life, reply, reign) if self.clients[i].life == life => {
                self.joined(i, reply, reign);
            }
            Event::SyncAnswer(i, life, reply) if self.clients[i].life == life => self.synced(i, reply),
            Event::HeartbeatAnswer(i, life, code) if self.clients[i].life == life => {
                self.heartbeat_answered(i, code);
            }
            Event::Retry(i, life) if self.clients[i].life == life => self.start_join(i),
            Event::Stored(reign, token, metadata) if reign == self.reign => {
                let fails = !self.quiet && self.below(20) == 0;
                if !fails {
                    self.durable = Some(*metadata);
                }
                let outcome = if fails { Err(E::CoordinatorNotAvailable) } else { Ok(()) };
                let effects = self.group.stored(now(self.at), token, outcome);
                self.act(effects);
            }
            Event::Chaos if !self.quiet => self.chaos(),
            _ => {}
        }
    }

    fn chaos(&mut self) {
        let i = self.below(self.clients.len() as u64) as usize;
        match self.below(12) {
            0..6 if self.clients[i].phase == Phase::Off => self.start_join(i),
            // A second process with the same instance; the first one lives on in vain.
            6 if self.clients[i].instance.is_some() => self.restart(i),
            7 | 8 if self.clients[i].phase != Phase::Off => self.crash(i),
            9 if self.clients[i].phase != Phase::Off => self.leave(i),
            10 => self.coordinator_restarts(),
            _ => {}
        }
        let pause = Duration::from_millis(self.below(8_000));
        self.after(pause, Event::Chaos);
    }

    fn begin(&mut self, i: usize) -> u64 {
        self.clients[i].life += 1;
        self.clients[i].life
    }

    fn start_join(&mut self, i: usize) {
        let life = self.begin(i);
        self.clients[i].phase = Phase::Joining;
        self.travel(Event::Join(i, life));
    }

    fn restart(&mut self, i: usize) {
        self.crash(i);
        self.start_join(i);
    }

    fn crash(&mut self, i: usize) {
        self.begin(i);
        let client = &mut self.clients[i];
        client.phase = Phase::Off;
        client.member = None;
        client.excused = false;
        client.held.clear();
    }

    fn leave(&mut self, i: usize) {
        let leaver =
            Leaver { member: self.clients[i].member.clone(), instance: self.clients[i].instance.clone() };
        self.crash(i);
        if leaver.member.is_some() {
            let (_, effects) = self.group.leave(now(self.at), &[leaver]);
            self.act(effects);
        }
    }

    fn coordinator_restarts(&mut self) {
        self.reign += 1;
        let lost: Vec<(usize, u64)> = std::mem::take(&mut self.open).into_values().collect();
        let metadata = self.durable.clone();
        let known: BTreeSet<MemberId> =
            metadata.iter().flat_map(|m| &m.members).map(|m| m.member_id.clone()).collect();
        self.group = match metadata {
            Some(metadata) => Group::restore(GroupId::new("g"), rules(), metadata, now(self.at)),
            None => Group::new(GroupId::new("g"), rules(), now(self.at)),
        };
        for client in &mut self.clients {
            // Also one whose id is on its way to it.
            client.excused = client.member.as_ref().is_none_or(|m| !known.contains(m));
        }
        for (i, life) in lost {
            let delay = Duration::from_millis(100 + self.below(400));
            self.after(delay, Event::Retry(i, life));
        }
    }

    fn deliver_join(&mut self, i: usize, life: u64) {
        if self.clients[i].life != life {
            return;
        }
        self.ids += 1;
        let request = JoinRequest {
            member: self.clients[i].member.clone(),
            fresh_id: id(&format!("m{}", self.ids)),
            instance: self.clients[i].instance.clone(),
            client_id: format!("c{i}"),
            client_host: "/127.0.0.1".to_owned(),
            session_timeout: SESSION,
            rebalance_timeout: REBALANCE,
            protocol_type: "consumer".to_owned(),
            protocols: vec![protocol("range")],
            id_required: true,
            may_skip_assignment: i.is_multiple_of(2),
        };
        let ticket = self.take_ticket(i, life);
        let effects = self.group.join(now(self.at), ticket, request);
        self.act(effects);
    }

    fn deliver_sync(&mut self, i: usize, life: u64, assignments: Vec<(MemberId, Bytes)>) {
        let client = self.clients[i].clone();
        let Some(member) = client.member.filter(|_| client.life == life) else { return };
        let request = SyncRequest {
            member,
            instance: client.instance,
            generation: client.generation,
            protocol_type: Some("consumer".to_owned()),
            protocol: Some("range".to_owned()),
            assignments,
        };
        let ticket = self.take_ticket(i, life);
        let effects = self.group.sync(now(self.at), ticket, request);
        self.act(effects);
    }

    fn deliver_heartbeat(&mut self, i: usize, life: u64) {
        let client = self.clients[i].clone();
        let Some(member) = client.member.filter(|_| client.life == life) else { return };
        let code = self.group.heartbeat(now(self.at), &member, client.instance.as_ref(), client.generation);
        self.travel(Event::HeartbeatAnswer(i, life, code));
    }

    fn take_ticket(&mut self, i: usize, life: u64) -> Ticket {
        self.sequence += 1;
        let ticket = Ticket(self.sequence);
        self.open.insert(ticket, (i, life));
        ticket
    }

    fn act(&mut self, effects: Vec<Effect>) {
        for effect in effects {
            match effect {
                Effect::AnswerJoin(ticket, reply) => {
                    let (i, life) = self.open.remove(&ticket).expect("a ticket is answered once");
                    self.answer(i, life, Event::JoinAnswer(i, life, reply, self.reign));
                }
                Effect::AnswerSync(ticket, reply) => {
                    let (i, life) = self.open.remove(&ticket).expect("a ticket is answered once");
                    self.answer(i, life, Event::SyncAnswer(i, life, reply));
                }
                Effect::Store(token, metadata) => {
                    let delay = Duration::from_millis(self.below(50));
                    self.after(delay, Event::Stored(self.reign, token, Box::new(metadata)));
                }
                Effect::Departed(..) => {}
            }
        }
    }

    /// Some answers are lost, and the client tries again.
    fn answer(&mut self, i: usize, life: u64, event: Event) {
        if !self.quiet && self.below(25) == 0 {
            self.after(RETRY, Event::Retry(i, life));
        } else {
            self.travel(event);
        }
    }

    fn joined(&mut self, i: usize, reply: JoinReply, reign: u64) {
        match reply.error {
            E::None => {
                self.rebalances += 1;
                let assignments = self.assign(i, &reply);
                let life = self.begin(i);
                let client = &mut self.clients[i];
                client.member = reply.member;
                client.generation = reply.generation;
                client.phase = Phase::Syncing;
                client.excused = reign != self.reign;
                self.travel(Event::Sync(i, life, assignments));
                self.after(HEARTBEAT, Event::Heartbeat(i, life));
            }
            E::MemberIdRequired => {
                self.clients[i].member = reply.member;
                self.start_join(i);
            }
            error => self.start_over(i, error),
        }
    }

    fn assign(&mut self, i: usize, reply: &JoinReply) -> Vec<(MemberId, Bytes)> {
        let leads = reply.leader == reply.member && !reply.skip_assignment;
        if !leads || reply.members.is_empty() {
            return Vec::new();
        }
        assert!(reply.members.iter().any(|m| Some(&m.id) == reply.member.as_ref()), "seed {} {i}", self.seed);
        let mut shares: BTreeMap<MemberId, Vec<u8>> = BTreeMap::new();
        for partition in 0..PARTITIONS {
            let member = &reply.members[partition as usize % reply.members.len()];
            shares.entry(member.id.clone()).or_default().push(partition as u8);
        }
        shares.into_iter().map(|(id, share)| (id, encode_share(&share))).collect()
    }

    fn synced(&mut self, i: usize, reply: SyncReply) {
        if reply.error != E::None {
            return self.start_over(i, reply.error);
        }
        let held = decode_share(&reply.assignment);
        let client = &mut self.clients[i];
        client.phase = Phase::Stable;
        let holder = match &client.instance {
            Some(instance) => instance.to_string(),
            None => client.member.clone().expect("it has synced").to_string(),
        };
        for partition in &held {
            let key = (client.generation, *partition);
            let known = self.holders.entry(key).or_insert_with(|| holder.clone());
            assert_eq!(*known, holder, "seed {}: {key:?} has two holders", self.seed);
        }
        client.held = held;
    }

    fn heartbeat_answered(&mut self, i: usize, code: ErrorCode) {
        match code {
            E::None => {
                let life = self.clients[i].life;
                self.after(HEARTBEAT, Event::Heartbeat(i, life));
            }
            error => self.start_over(i, error),
        }
    }

    fn start_over(&mut self, i: usize, error: ErrorCode) {
        let client = &mut self.clients[i];
        match error {
            E::UnknownMemberId => {
                assert!(client.excused, "seed {}: live member {client:?} is unknown", self.seed);
                client.member = None;
                self.start_join(i);
            }
            E::RebalanceInProgress | E::IllegalGeneration | E::CoordinatorNotAvailable => self.start_join(i),
            E::FencedInstanceId => self.crash(i),
            other => panic!("seed {}: {other:?} for {client:?}", self.seed),
        }
    }

    fn settle(&mut self) {
        self.quiet = true;
        let end = self.at + Duration::from_secs(600);
        self.run_until(end);
        let seed = self.seed;
        assert!(self.open.is_empty(), "seed {seed}: unanswered {:?}", self.open);
        let live: Vec<&Client> = self.clients.iter().filter(|c| c.phase != Phase::Off).collect();
        let mut held: Vec<i32> = live.iter().flat_map(|c| c.held.iter().copied()).collect();
        held.sort_unstable();
        if live.is_empty() {
            assert_eq!(self.group.state(), GroupState::Empty, "seed {seed}");
            assert!(self.group.is_idle(), "seed {seed}");
        } else {
            assert_eq!(self.group.state(), GroupState::Stable, "seed {seed}: {live:?}");
            assert!(live.iter().all(|c| c.phase == Phase::Stable), "seed {seed}: {live:?}");
            assert_eq!(held, (0..PARTITIONS).collect::<Vec<_>>(), "seed {seed}");
        }
        let support: usize = self.group.support.values().sum();
        assert_eq!(support, self.group.members.len(), "seed {seed}: votes are counted wrong");
    }
}

fn rules() -> GroupRules {
    GroupRules {
        initial_rebalance_delay: Duration::from_secs(3),
        members_max: 100,
        new_member_join_timeout: Duration::from_secs(300),
    }
}

fn encode_share(share: &[u8]) -> Bytes {
    let mut out = vec![0, 0, 0, 0, 0, 1, 0, 1, b't', 0, 0, 0, share.len() as u8];
    for partition in share {
        out.extend([0, 0, 0, *partition]);
    }
    out.extend([0xff; 4]);
    out.into()
}

fn decode_share(bytes: &Bytes) -> BTreeSet<i32> {
    let parsed = consumer_protocol::assigned_partitions(bytes.clone()).expect("assignments always decode");
    parsed.into_iter().flat_map(|(_, partitions)| partitions).collect()
}

#[test]
fn no_fleet_breaks_the_group() {
    let one = std::env::var("SEALANE_SEED").ok().and_then(|s| s.parse().ok());
    let seeds = one.map_or(1..=400, |seed| seed..=seed);
    let mut rebalances = 0;
    for seed in seeds {
        let mut world = World::new(seed);
        world.run_until(Duration::from_secs(240));
        world.settle();
        rebalances += world.rebalances;
    }
    assert!(rebalances > 0, "nothing was at stake");
}
