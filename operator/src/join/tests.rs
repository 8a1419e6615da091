//! One side asks the other over loopback: with the right authority, with another, with none.

use std::time::Duration;

use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair};
use tokio::io::AsyncWriteExt as _;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use super::*;

/// An authority, and the chain and key of a door that it signed.
struct Authority {
    fingerprint: Fingerprint,
    chain: String,
    key: String,
}

fn authority(door: &str) -> Authority {
    let key = KeyPair::generate().expect("a key");
    let mut params = CertificateParams::default();
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.distinguished_name.push(DnType::CommonName, "an authority");
    let root = params.self_signed(&key).expect("an authority");
    let issuer = Issuer::from_ca_cert_der(root.der(), key).expect("an issuer");
    let leaf_key = KeyPair::generate().expect("a key");
    let params = CertificateParams::new(vec![door.to_owned()]).expect("a name");
    let leaf = params.signed_by(&leaf_key, &issuer).expect("a leaf");
    Authority {
        fingerprint: Fingerprint::of(root.der()),
        chain: format!("{}{}", leaf.pem(), root.pem()),
        key: leaf_key.serialize_pem(),
    }
}

/// A server that says yes to everything; its address.
async fn server(doors: Doors) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("an address").to_string();
    let (asked, mut questions) = mpsc::channel::<Asked>(4);
    tokio::spawn(serve(listener, doors, asked, CancellationToken::new()));
    tokio::spawn(async move {
        while let Some(asked) = questions.recv().await {
            let joined = Answer::Joined {
                region: "east".to_owned(),
                authorities: asked.request.region,
                endpoint: "mirror:9096".to_owned(),
                vouched: String::new(),
            };
            asked.answer.send(joined).expect("somebody waits");
        }
    });
    address
}

fn request() -> Request {
    Request {
        version: 2,
        grant: "east/west".to_owned(),
        token: "t".to_owned(),
        region: "west".to_owned(),
        authorities: String::new(),
        vouched: String::new(),
        knows: String::new(),
    }
}

#[tokio::test]
async fn who_shows_the_authority_of_the_fingerprint_is_asked_and_nobody_else() {
    let name = door_name("east", "east");
    let (right, other) = (authority(&name), authority(&name));
    let doors = Doors::default();
    doors.open(&name, &right.chain, &right.key).expect("it is a certificate");
    let address = server(doors.clone()).await;

    let answer =
        ask(&address, &name, &[other.fingerprint, right.fingerprint], &request()).await.expect("an answer");
    assert!(matches!(answer, Answer::Joined { region, .. } if region == "east"));

    // The fingerprint of another authority: nothing is said, the token least of all.
    let error = ask(&address, &name, &[other.fingerprint], &request()).await.expect_err("it is another");
    assert!(matches!(error, JoinError::WrongAuthority { .. }), "{error}");
    // The right authority's certificate sent along by somebody who has not its key.
    let forged = format!("{}{}", first(&other.chain), last(&right.chain));
    doors.open(&name, &forged, &other.key).expect("it is a certificate");
    let error = ask(&address, &name, &[right.fingerprint], &request()).await.expect_err("it is forged");
    assert!(matches!(error, JoinError::WrongAuthority { .. }), "{error}");

    doors.close(&name);
    let error = ask(&address, &name, &[right.fingerprint], &request()).await.expect_err("it is closed");
    assert!(matches!(error, JoinError::Unreachable { .. }), "{error}");
}

#[tokio::test]
async fn what_is_no_question_is_refused_or_dropped_and_the_next_one_is_answered() {
    let name = door_name("east", "east");
    let right = authority(&name);
    let doors = Doors::default();
    doors.open(&name, &right.chain, &right.key).expect("it is a certificate");
    let address = server(doors).await;
    let mut stream = TcpStream::connect(&address).await.expect("it listens");
    stream.write_all(b"GET / HTTP/1.1\r\n\r\n").await.expect("it reads");
    let mut old = request();
    old.version = 0;
    let wanted = [right.fingerprint];
    for question in [old, request()] {
        let answer = tokio::time::timeout(Duration::from_secs(60), ask(&address, &name, &wanted, &question));
        answer.await.expect("in time").expect("an answer");
    }
}

#[test]
fn a_fingerprint_is_read_as_it_is_written_and_nothing_else_is_one() {
    let fingerprint = Fingerprint::of(b"certificate");
    assert_eq!(Fingerprint::parse(&fingerprint.to_string()), Some(fingerprint));
    let text = fingerprint.to_string();
    for wrong in ["", "sha256:", "sha1:00", &text[..70], &text.replace("sha256", "md5"), &format!("{text}0")]
    {
        assert_eq!(Fingerprint::parse(wrong), None, "{wrong}");
    }
    assert_eq!(Fingerprint::parse(&format!("sha256:{}", "é".repeat(32))), None);
}

fn first(chain: &str) -> String {
    let end = chain.find("-----END CERTIFICATE-----").expect("a certificate") + 26;
    chain[..end].to_owned()
}

fn last(chain: &str) -> String {
    chain[first(chain).len()..].to_owned()
}
