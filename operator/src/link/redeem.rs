//! Answers who shows a token. That it was taken is that the Secret of the grant's peer exists: it can be created once.

use std::sync::Arc;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::Secret;
use kube::api::{Api, PostParams};
use tokio::sync::mpsc;
use tracing::{info, warn};

use super::peers::{self, Peer};
use super::token::{Grant, Judgement, judge};
use super::{address, grant};
use crate::apply::Owner;
use crate::context::Context;
use crate::crd::LinkGrant;
use crate::failure::Failure;
use crate::join::{Answer, Asked, Refusal, Request};
use crate::names::{MANAGED_BY, MANAGER, OWNER};
use crate::region::Region;

/// Answers one question after the other, for as long as there are any.
pub async fn answer(cx: Arc<Context>, mut questions: mpsc::Receiver<Asked>) {
    while let Some(Asked { request, answer }) = questions.recv().await {
        let said = match decide(&cx, &request).await {
            Ok(said) => said,
            Err(failure) => {
                warn!(grant = request.grant, "a token cannot be redeemed now: {failure}");
                refuse(Refusal::NotReady, "the region is not ready; ask again")
            }
        };
        match &said {
            Answer::Joined { .. } => {
                info!(grant = request.grant, peer = request.region, "a region has joined")
            }
            Answer::Refused { reason, message } => {
                info!(
                    grant = request.grant,
                    peer = request.region,
                    "a token was refused: {reason:?}, {message}"
                );
            }
        }
        // Who asked may be gone.
        let _ = answer.send(said);
    }
}

async fn decide(cx: &Context, request: &Request) -> Result<Answer, Failure> {
    cx.fence()?;
    let unknown = || refuse(Refusal::TokenUnknown, "no grant has this token");
    let Some((namespace, name)) = request.grant.split_once('/') else { return Ok(unknown()) };
    let is_name = |text: &str| {
        !text.is_empty()
            && text.len() <= 253
            && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-.".contains(&byte))
    };
    if !is_name(namespace) || !is_name(name) || !cx.looks_after(namespace) {
        return Ok(unknown());
    }
    let Some(object) = cx.api::<LinkGrant>(namespace).get_opt(name).await? else { return Ok(unknown()) };
    let Some(issued) = grant::issued(cx, &object).await? else { return Ok(unknown()) };
    let secret = peers::of_grant(name);
    let taken = Peer::find(cx, namespace, &secret).await?;
    let known = Grant {
        token: &issued.token,
        peer: &object.spec.peer,
        expires: issued.expires,
        taken_by: taken.as_ref().map(|peer| (peer.by.as_str(), peer.authorities.as_str())),
    };
    let by = match judge(&known, request, Timestamp::now()) {
        Judgement::Refuse(reason, text) => return Ok(refuse(reason, &text)),
        Judgement::Again => None,
        Judgement::Take { by } | Judgement::Renew { by } => Some(by),
    };
    let Some(region) = Region::find(cx, namespace, &object.spec.cluster_ref.name).await? else {
        return Ok(refuse(Refusal::NotReady, "the region's BrokerCluster is not there"));
    };
    // All that can fail comes before the token is taken.
    let authorities = region.authorities(cx).await?;
    let Some(mirror) = &region.cluster.spec.mirror else {
        return Ok(refuse(Refusal::NotReady, "the region's BrokerCluster has no spec.mirror"));
    };
    let endpoint = match address::of_mirrors(cx, &region, mirror).await? {
        Ok(endpoint) => endpoint,
        Err(why) => return Ok(refuse(Refusal::NotReady, &why)),
    };
    let by = by.or_else(|| taken.as_ref().map(|peer| peer.by.clone())).unwrap_or_default();
    let peer = Peer {
        region: request.region.clone(),
        authorities: request.authorities.clone(),
        endpoint: None,
        by,
        knows: request.knows.clone(),
    };
    let kept = match &taken {
        None => take(cx, &object, &peer.secret(&secret, &region.names.cluster)).await?,
        Some(known) => *known == peer || renew(cx, namespace, &secret, known, &peer).await?,
    };
    if !kept {
        return Ok(refuse(Refusal::TokenUsed, "the token was used before; ask for another grant"));
    }
    let vouched = region.vouched(cx).await?;
    Ok(Answer::Joined { region: region.cluster.spec.region.clone(), authorities, endpoint, vouched })
}

/// Writes what a peer says by now over what was known of it; false where that is not so any more.
async fn renew(
    cx: &Context,
    namespace: &str,
    name: &str,
    known: &Peer,
    peer: &Peer,
) -> Result<bool, Failure> {
    let Some(there) = cx.api::<Secret>(namespace).get_opt(name).await? else { return Ok(false) };
    if Peer::of(&there).as_ref() != Some(known) {
        return Ok(false);
    }
    let data = serde_json::to_value(peer.secret(name, "").data)
        .map_err(|error| Failure::Invalid(error.to_string()))?;
    cx.merge(&there, serde_json::json!({ "data": data })).await?;
    Ok(true)
}

/// Creates the Secret; false where it is there.
async fn take(cx: &Context, grant: &LinkGrant, secret: &Secret) -> Result<bool, Failure> {
    let owner = Owner::of(grant);
    let mut secret = secret.clone();
    secret.metadata.owner_references = Some(vec![owner.reference.clone()]);
    let labels = secret.metadata.labels.get_or_insert_default();
    labels.insert(MANAGED_BY.to_owned(), MANAGER.to_owned());
    labels.insert(OWNER.to_owned(), owner.label());
    cx.fence()?;
    let api: Api<Secret> = cx.api(&owner.namespace);
    match api.create(&PostParams::default(), &secret).await.map_err(Failure::from) {
        Ok(_) => Ok(true),
        Err(failure) if failure.is_conflict() => Ok(false),
        Err(failure) => Err(failure),
    }
}

fn refuse(reason: Refusal, text: &str) -> Answer {
    Answer::Refused { reason, message: text.to_owned() }
}
