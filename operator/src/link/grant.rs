//! LinkGrant: makes the token and its Secret, opens the door, and tells whether it was taken.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::Secret;
use kube::ResourceExt as _;
use kube::api::ObjectMeta;
use kube::runtime::events::EventType;
use rcgen::{CertificateParams, DnType, ExtendedKeyUsagePurpose, Issuer, KeyPair, KeyUsagePurpose};
use rustls_pki_types::CertificateDer;
use rustls_pki_types::pem::PemObject as _;

use super::address;
use super::peers::{self, Peer};
use super::token::Token;
use crate::apply::Owner;
use crate::conditions::{Verdict, after};
use crate::context::{Context, is_paused};
use crate::controller::{Again, Reconciled};
use crate::crd::{LinkGrant, LinkGrantStatus, Ref};
use crate::failure::Failure;
use crate::join::{Fingerprint, door_name};
use crate::names::{CLUSTER, COMPONENT, PART_OF};
use crate::region::{Pair, Region};

pub fn reconcile(cx: Arc<Context>, grant: Arc<LinkGrant>) -> BoxFuture<'static, Reconciled> {
    async move {
        if grant.metadata.deletion_timestamp.is_some() || is_paused(&*grant) {
            return Ok(Again(LOOK));
        }
        let mut status = grant.status.clone().unwrap_or_default();
        let outcome = bring(&cx, &grant, &mut status).await;
        let verdict = match outcome {
            Ok(verdict) => verdict,
            Err(foreign @ Failure::Foreign { .. }) => Verdict::no("Ready", "NameTaken", foreign.to_string()),
            Err(Failure::DataPlane(text)) => Verdict::no("Ready", "ClusterNotReady", text),
            Err(other) => return Err(other),
        };
        let again = if verdict.reason == "TokenExpired" || verdict.reason == "Joined" { LOOK } else { SOON };
        tell(&cx, &grant, &verdict).await;
        status.observed_generation = grant.metadata.generation;
        status.conditions = after(&status.conditions, &[verdict], grant.metadata.generation);
        cx.status(&*grant, grant.status.as_ref(), &status).await?;
        Ok(Again(again))
    }
    .boxed()
}

async fn bring(cx: &Context, grant: &LinkGrant, status: &mut LinkGrantStatus) -> Result<Verdict, Failure> {
    let (namespace, name) = (grant.namespace().unwrap_or_default(), grant.name_any());
    let Some(region) = Region::find(cx, &namespace, &grant.spec.cluster_ref.name).await? else {
        let text = format!("there is no BrokerCluster {}", grant.spec.cluster_ref.name);
        return Ok(Verdict::no("Ready", "ClusterNotFound", text));
    };
    if grant.spec.peer == region.cluster.spec.region {
        let text = format!("spec.peer is this region itself, {}", grant.spec.peer);
        return Ok(Verdict::no("Ready", "SelfLink", text));
    }
    let Some(mirror) = region.cluster.spec.mirror.clone() else {
        let text = format!("BrokerCluster {} has no spec.mirror", region.names.cluster);
        return Ok(Verdict::no("Ready", "NoMirror", text));
    };
    let endpoint = match address::of_mirrors(cx, &region, &mirror).await? {
        Ok(endpoint) => endpoint,
        Err(why) => return Ok(Verdict::no("Ready", "EndpointPending", why)),
    };
    status.endpoint = Some(endpoint.clone());
    let join = match address::of_join(cx).await? {
        Ok(join) => join,
        Err(why) => return Ok(Verdict::no("Ready", "JoinUnreachable", why)),
    };
    let authority = region.authority(cx).await?;
    let door = door_name(&namespace, &region.names.cluster);
    open(cx, &door, &authority)?;

    let joined = Peer::find(cx, &namespace, &peers::of_grant(&name)).await?;
    let issued = issued(cx, grant).await?;
    let certificate = first(&authority.certificate)?;
    let minutes = SignedDuration::from_mins(i64::from(grant.spec.valid_minutes));
    let token = Token {
        grant: format!("{namespace}/{name}"),
        token: match &issued {
            Some(issued) => issued.token.clone(),
            None => Token::word().map_err(|_| Failure::Invalid("there is no randomness".to_owned()))?,
        },
        region: region.cluster.spec.region.clone(),
        join,
        door,
        endpoint,
        fingerprint: Fingerprint::of(&certificate).to_string(),
        expires: match &issued {
            Some(issued) => issued.expires,
            None => whole_second(Timestamp::now() + minutes),
        },
    };
    status.token_secret_ref = Some(Ref::to(&secret_of(&name)));
    status.expires_at = Some(token.expires.to_string());
    cx.apply(&Owner::of(grant), &secret(&name, &region.names.cluster, &token)).await?;
    if let Some(peer) = joined {
        return Ok(Verdict::yes("Ready", "Joined", format!("region {} has joined", peer.region)));
    }
    if Timestamp::now() >= token.expires {
        let text = format!("nobody joined before {}; delete this LinkGrant and make another", token.expires);
        return Ok(Verdict::no("Ready", "TokenExpired", text));
    }
    let text = format!("Secret {} is for the MirrorLink of region {}", secret_of(&name), grant.spec.peer);
    Ok(Verdict::yes("Ready", "TokenIssued", text))
}

/// The token that was made for this very object before.
pub(super) async fn issued(cx: &Context, grant: &LinkGrant) -> Result<Option<Token>, Failure> {
    let namespace = grant.namespace().unwrap_or_default();
    let secret = cx.api::<Secret>(&namespace).get_opt(&secret_of(&grant.name_any())).await?;
    let ours = secret.filter(|secret| {
        secret.owner_references().iter().any(|owner| Some(&owner.uid) == grant.metadata.uid.as_ref())
    });
    Ok(ours.and_then(|secret| Token::from_data(&secret.data.unwrap_or_default()).ok()))
}

/// Shows the authority's own certificate along with one that it signs for this moment.
fn open(cx: &Context, door: &str, authority: &Pair) -> Result<(), Failure> {
    let invalid = |text: String| Failure::Invalid(format!("the door of the link: {text}"));
    let make = || -> Result<(String, String), rcgen::Error> {
        let issuer = Issuer::from_ca_cert_pem(&authority.certificate, KeyPair::from_pem(&authority.key)?)?;
        let mut params = CertificateParams::new(vec![door.to_owned()])?;
        params.distinguished_name.push(DnType::CommonName, "sealane-join");
        params.use_authority_key_identifier_extension = true;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        let now = time::OffsetDateTime::now_utc();
        (params.not_before, params.not_after) =
            (now - time::Duration::minutes(5), now + time::Duration::days(1));
        let key = KeyPair::generate()?;
        let certificate = params.signed_by(&key, &issuer)?;
        Ok((format!("{}{}", certificate.pem(), authority.certificate), key.serialize_pem()))
    };
    let (chain, key) = make().map_err(|error| invalid(error.to_string()))?;
    cx.doors.open(door, &chain, &key).map_err(invalid)
}

fn secret(grant: &str, cluster: &str, token: &Token) -> Secret {
    let labels = [(CLUSTER, cluster), (COMPONENT, "token"), (PART_OF, "sealane")];
    let labels = labels.map(|(key, value)| (key.to_owned(), value.to_owned()));
    let data =
        token.to_data().into_iter().map(|(key, value)| (key, k8s_openapi::ByteString(value.into_bytes())));
    Secret {
        metadata: ObjectMeta {
            name: Some(secret_of(grant)),
            labels: Some(BTreeMap::from(labels)),
            ..ObjectMeta::default()
        },
        data: Some(data.collect()),
        ..Secret::default()
    }
}

/// An Event for what a person waits for.
async fn tell(cx: &Context, grant: &LinkGrant, verdict: &Verdict) {
    let before =
        grant.status.as_ref().and_then(|status| status.conditions.iter().find(|was| was.type_ == "Ready"));
    if before.is_some_and(|was| was.reason == verdict.reason) {
        return;
    }
    let kind = if verdict.status == crate::conditions::Status::True {
        EventType::Normal
    } else {
        EventType::Warning
    };
    cx.event(grant, kind, verdict.reason, "Grant", verdict.message.clone()).await;
}

/// The authority that signs now is the first of the file.
fn first(pem: &str) -> Result<CertificateDer<'static>, Failure> {
    CertificateDer::from_pem_slice(pem.as_bytes())
        .map_err(|error| Failure::Invalid(format!("the authority: {error}")))
}

fn whole_second(time: Timestamp) -> Timestamp {
    Timestamp::from_second(time.as_second()).unwrap_or(time)
}

pub(super) fn secret_of(grant: &str) -> String {
    format!("{grant}-token")
}

const LOOK: Duration = Duration::from_secs(30);
const SOON: Duration = Duration::from_secs(5);
