//! MirrorLink: redeems the token, sets what crosses, and tells how the link stands.
//!
//! Once joined, it asks the other region again now and then: so each hears of the other's new authorities.

use std::sync::Arc;
use std::time::Duration;

use control::v1;
use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use k8s_openapi::api::core::v1::Secret;
use kube::ResourceExt as _;
use kube::runtime::events::EventType;
use rustls_pki_types::CertificateDer;
use rustls_pki_types::pem::PemObject as _;

use super::peers::{self, Peer};
use super::token::{Token, mark};
use super::vouching::believed;
use super::{grant, said};
use crate::apply::Owner;
use crate::conditions::{Status, Verdict, after, is_true};
use crate::context::{Context, is_paused};
use crate::controller::{Again, Reconciled};
use crate::crd::{LinkGrant, MirrorLink, MirrorLinkSpec, MirrorLinkStatus};
use crate::failure::Failure;
use crate::join::{Answer, Fingerprint, Refusal, Request, ask};
use crate::region::Region;

pub fn reconcile(cx: Arc<Context>, link: Arc<MirrorLink>) -> BoxFuture<'static, Reconciled> {
    async move {
        if link.metadata.deletion_timestamp.is_some() || is_paused(&*link) {
            return Ok(Again(LOOK));
        }
        let mut status = link.status.clone().unwrap_or_default();
        let verdicts = match bring(&cx, &link, &mut status).await {
            Ok(verdicts) => verdicts,
            Err(foreign @ Failure::Foreign { .. }) => {
                vec![Verdict::no("Ready", "NameTaken", foreign.to_string())]
            }
            Err(Failure::DataPlane(text)) => vec![Verdict::no("Ready", "ClusterNotReady", text)],
            Err(other) => return Err(other),
        };
        tell(&cx, &link, &verdicts).await;
        status.observed_generation = link.metadata.generation;
        status.conditions = after(&status.conditions, &verdicts, link.metadata.generation);
        let ready = is_true(&status.conditions, "Ready");
        cx.status(&*link, link.status.as_ref(), &status).await?;
        Ok(Again(if ready { LOOK } else { SOON }))
    }
    .boxed()
}

async fn bring(
    cx: &Context,
    link: &MirrorLink,
    status: &mut MirrorLinkStatus,
) -> Result<Vec<Verdict>, Failure> {
    let namespace = link.namespace().unwrap_or_default();
    let not_ready = |reason, text: String| vec![Verdict::no("Ready", reason, text)];
    let Some(region) = Region::find(cx, &namespace, &link.spec.cluster_ref.name).await? else {
        let text = format!("there is no BrokerCluster {}", link.spec.cluster_ref.name);
        return Ok(not_ready("ClusterNotFound", text));
    };
    if region.cluster.spec.mirror.is_none() {
        let text = format!("BrokerCluster {} has no spec.mirror", region.names.cluster);
        return Ok(not_ready("NoMirror", text));
    }
    let joined = match join(cx, link, &region).await? {
        Ok(text) => Verdict::yes("Joined", "Joined", text),
        Err((reason, text)) => {
            let joined = Verdict::no("Joined", reason, text.clone());
            return Ok(vec![joined, Verdict::no("Ready", reason, text)]);
        }
    };
    status.direction = Some(if link.spec.paused { "none" } else { "both" }.to_owned());
    let ready = match report(cx, link, &region).await {
        Ok(report) => said::judge(&link.spec, &report, status),
        // Who has joined is known without the brokers.
        Err(Failure::DataPlane(text)) => {
            said::clear(status, "Unknown");
            Verdict::no("Ready", "ClusterNotReady", text)
        }
        Err(other) => return Err(other),
    };
    Ok(vec![joined, ready])
}

/// Sets the link's policy, and asks how it stands.
async fn report(
    cx: &Context,
    link: &MirrorLink,
    region: &Region,
) -> Result<v1::MirrorStatusResponse, Failure> {
    let mut control = region.control(cx).await?;
    let called = async {
        set(&mut control, &link.spec).await?;
        control.mirror_status(v1::MirrorStatusRequest {}).await
    };
    let report = called.await;
    let silent = |error: tonic::Status| Failure::DataPlane(format!("control service: {}", error.message()));
    Ok(report.map_err(silent)?.into_inner())
}

/// Sets the link's policy where it is another.
async fn set(control: &mut control::Client, spec: &MirrorLinkSpec) -> Result<(), tonic::Status> {
    let listed = control.list_links(v1::ListLinksRequest {}).await?.into_inner();
    let rate =
        spec.bandwidth.as_ref().map_or(0, |bandwidth| bandwidth.bytes_per_second.max(0).unsigned_abs());
    let is_so = listed.links.iter().any(|policy| {
        policy.peer == spec.peer
            && policy.stored
            && policy.topics == spec.topics.include
            && policy.exclude == spec.topics.exclude
            && (policy.boe_lanes, policy.ppe_lanes) == (spec.lanes.boe, spec.lanes.ppe)
            && (policy.deletions, policy.paused) == (spec.deletions, spec.paused)
            && policy.rate_bytes_max == rate
    });
    if is_so {
        return Ok(());
    }
    let patterns = |patterns: &[String]| Some(v1::PatternList { patterns: patterns.to_vec() });
    let request = v1::SetLinkRequest {
        peer: spec.peer.clone(),
        topics: patterns(&spec.topics.include),
        exclude: patterns(&spec.topics.exclude),
        boe_lanes: Some(spec.lanes.boe),
        ppe_lanes: Some(spec.lanes.ppe),
        deletions: Some(spec.deletions),
        paused: Some(spec.paused),
        rate_bytes_max: Some(rate),
        congestion: None,
    };
    control.set_link(request).await.map(drop)
}

type Joined = Result<String, (&'static str, String)>;

/// Sees to it that both sides know each other.
async fn join(cx: &Context, link: &MirrorLink, region: &Region) -> Result<Joined, Failure> {
    let namespace = link.namespace().unwrap_or_default();
    let name = peers::of_link(&link.name_any());
    let known = Peer::find(cx, &namespace, &name).await?;
    let token = match token(cx, link).await? {
        Ok(Some(token)) => token,
        Ok(None) => return waiting(cx, link, region).await,
        // Once joined, the token is not needed any more.
        Err(_) if known.is_some() => return Ok(Ok(format!("joined region {}", link.spec.peer))),
        Err(why) => return Ok(Err(why)),
    };
    let by = Fingerprint::of(token.token.as_bytes()).to_string();
    if let Some(known) = known.filter(|known| known.by == by) {
        refresh(cx, link, region, &token, &known).await?;
        return Ok(Ok(format!("joined region {}", link.spec.peer)));
    }
    if token.region != link.spec.peer {
        let text = format!("the token is of region {}, spec.peer is {}", token.region, link.spec.peer);
        return Ok(Err(("WrongPeer", text)));
    }
    let Some(wanted) = Fingerprint::parse(&token.fingerprint) else {
        return Ok(Err(("TokenMalformed", format!("key fingerprint holds {:?}", token.fingerprint))));
    };
    let request = question(cx, region, &token, String::new()).await?;
    match ask(&token.join, &token.door, &[wanted], &request).await {
        Err(crate::join::JoinError::WrongAuthority { .. }) => {
            let text = format!(
                "{} is not the region of the token: its authority has another fingerprint",
                token.join
            );
            Ok(Err(("WrongFingerprint", text)))
        }
        Err(error) => Ok(Err(("PeerUnreachable", error.to_string()))),
        Ok(Answer::Refused { reason: Refusal::NotReady, message }) => Ok(Err(("PeerNotReady", message))),
        Ok(Answer::Refused { reason, message }) => Ok(Err((reason.as_str(), message))),
        Ok(Answer::Joined { region: peer, authorities, endpoint, .. }) => {
            let knows = mark(&request.authorities).unwrap_or_default();
            let joined = Peer { region: peer, authorities, endpoint: Some(endpoint), by, knows };
            cx.apply(&Owner::of(link), &joined.secret(&name, &region.names.cluster)).await?;
            Ok(Ok(format!("joined region {}", link.spec.peer)))
        }
    }
}

/// What this region says of itself to the other; `knows` is what it knows of that one.
async fn question(cx: &Context, region: &Region, token: &Token, knows: String) -> Result<Request, Failure> {
    Ok(Request {
        version: 2,
        grant: token.grant.clone(),
        token: token.token.clone(),
        region: region.cluster.spec.region.clone(),
        authorities: region.authorities(cx).await?,
        vouched: region.vouched(cx).await?,
        knows,
    })
}

/// Tells a joined region of this one's authorities and hears of its own: now and then, and when there is news. What fails is
/// tried again; who is linked stays linked meanwhile.
async fn refresh(
    cx: &Context,
    link: &MirrorLink,
    region: &Region,
    token: &Token,
    known: &Peer,
) -> Result<(), Failure> {
    let Ok(knows) = mark(&known.authorities) else { return Ok(()) };
    let request = question(cx, region, token, knows).await?;
    let news = mark(&request.authorities).is_ok_and(|own| own != known.knows);
    let uid = link.uid().unwrap_or_default();
    let due =
        cx.asked.lock().get(&uid).is_none_or(|last| last.elapsed() >= if news { NEWS } else { NO_NEWS });
    if !due {
        return Ok(());
    }
    cx.asked.lock().insert(uid, tokio::time::Instant::now());
    let wanted: Vec<Fingerprint> = CertificateDer::pem_slice_iter(known.authorities.as_bytes())
        .filter_map(Result::ok)
        .map(|der| Fingerprint::of(&der))
        .collect();
    match ask(&token.join, &token.door, &wanted, &request).await {
        Ok(Answer::Joined { region: peer, authorities, endpoint, vouched })
            if peer == known.region && believed(&known.authorities, &authorities, &vouched) =>
        {
            let own = mark(&request.authorities).unwrap_or_default();
            let fresh = Peer { authorities, endpoint: Some(endpoint), knows: own, ..known.clone() };
            if fresh != *known {
                let name = peers::of_link(&link.name_any());
                cx.apply(&Owner::of(link), &fresh.secret(&name, &region.names.cluster)).await?;
                // What was learned is told at once: the other side waits for it.
                cx.asked.lock().remove(&link.uid().unwrap_or_default());
            }
        }
        Ok(Answer::Joined { .. }) => {
            tracing::warn!(peer = known.region, "shows authorities for which none that is known has spoken");
        }
        Ok(Answer::Refused { message, .. }) => {
            tracing::info!(peer = known.region, "not told of authorities: {message}")
        }
        Err(error) => tracing::debug!(peer = known.region, "not told of authorities: {error}"),
    }
    Ok(())
}

/// The token that the link names; none where the peer joins with one of ours.
async fn token(
    cx: &Context,
    link: &MirrorLink,
) -> Result<Result<Option<Token>, (&'static str, String)>, Failure> {
    let namespace = link.namespace().unwrap_or_default();
    if let Some(reference) = &link.spec.grant_ref {
        let (place, name) = (&reference.namespace, &reference.name);
        let hidden = || {
            Ok(Err((
                "GrantNotFound",
                format!("there is no LinkGrant {place}/{name} that names namespace {namespace}"),
            )))
        };
        if !cx.looks_after(place) {
            return hidden();
        }
        let granted = cx.api::<LinkGrant>(place).get_opt(name).await?;
        let Some(granted) =
            granted.filter(|granted| *place == namespace || granted.spec.namespaces.contains(&namespace))
        else {
            return hidden();
        };
        let issued = grant::issued(cx, &granted).await?;
        return Ok(issued
            .map(Some)
            .ok_or_else(|| ("PeerNotReady", format!("LinkGrant {place}/{name} has no token yet"))));
    }
    let Some(reference) = &link.spec.token_secret_ref else { return Ok(Ok(None)) };
    let name = &reference.name;
    let Some(secret) = cx.api::<Secret>(&namespace).get_opt(name).await? else {
        return Ok(Err(("TokenMissing", format!("there is no Secret {name}"))));
    };
    let token = Token::from_data(&secret.data.unwrap_or_default());
    Ok(token.map(Some).map_err(|why| ("TokenMalformed", format!("Secret {name} {why}"))))
}

/// Without a token of its own, the link waits for the peer to take one of this region's.
async fn waiting(cx: &Context, link: &MirrorLink, region: &Region) -> Result<Joined, Failure> {
    let namespace = link.namespace().unwrap_or_default();
    let peers = Peer::all(cx, &namespace, &region.names.cluster).await?;
    if peers.iter().any(|peer| peer.region == link.spec.peer) {
        return Ok(Ok(format!("region {} has joined", link.spec.peer)));
    }
    let text =
        format!("region {} has not joined with a token of a LinkGrant of this region yet", link.spec.peer);
    Ok(Err(("WaitingForPeer", text)))
}

async fn tell(cx: &Context, link: &MirrorLink, verdicts: &[Verdict]) {
    let Some(ready) = verdicts.iter().find(|verdict| verdict.type_ == "Ready") else { return };
    let before =
        link.status.as_ref().and_then(|status| status.conditions.iter().find(|was| was.type_ == "Ready"));
    if before.is_some_and(|was| was.reason == ready.reason) {
        return;
    }
    let kind = if ready.status == Status::True { EventType::Normal } else { EventType::Warning };
    cx.event(link, kind, ready.reason, "Link", ready.message.clone()).await;
}

/// Between two questions to a joined region.
const NEWS: Duration = Duration::from_secs(5);
const NO_NEWS: Duration = Duration::from_secs(60);
const LOOK: Duration = Duration::from_secs(10);
const SOON: Duration = Duration::from_secs(3);
