//! Floods: many connections, watches or signing requests at once. Each is kept up until the node's Lease was renewed
//! twice meanwhile, and it must never have lapsed.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use futures::{StreamExt as _, stream};
use jiff::Timestamp;
use reqwest::Method;
use serde_json::json;

use russet_tests::tenants::{HOSTILE, TenantMachine};

/// What is sent many times.
#[derive(Clone, Copy)]
pub enum Flood {
    /// HTTP/2 connections without a credential that ask for the version once and stay.
    IdleConnections,
    /// Watches of one tenant.
    Watches,
    /// CertificateSigningRequests of one join token.
    SigningRequests,
}

/// How many at once are being opened.
const OPENING: usize = 32;
const WATCHES_A_CONNECTION: usize = 50;
/// Time for two renewals of a Lease, which come every few seconds.
const RENEWAL_TIMEOUT: Duration = Duration::from_secs(90);
const LEASE: &str = "/apis/coordination.k8s.io/v1/namespaces/russet-system/leases/node-node-a";

/// Sends `count` of them; what came of it, in few words.
pub async fn send(fixture: &TenantMachine, flood: Flood, count: usize) -> Result<String> {
    match flood {
        Flood::IdleConnections => idle_connections(fixture, count).await,
        Flood::Watches => watches(fixture, count).await,
        Flood::SigningRequests => signing_requests(fixture, count).await,
    }
}

async fn idle_connections(fixture: &TenantMachine, count: usize) -> Result<String> {
    let clients: Vec<_> = stream::iter(0..count)
        .map(|_| async {
            let client = fixture.new_client().ok()?;
            let answer = client.get(format!("{}/version", fixture.url())).send().await.ok()?;
            answer.bytes().await.ok()?;
            // A connection lives as long as its client.
            Some(client)
        })
        .buffer_unordered(OPENING)
        .filter_map(async |client| client)
        .collect()
        .await;
    lease_is_renewed(fixture).await?;
    Ok(format!("{} of {count} answered", clients.len()))
}

async fn watches(fixture: &TenantMachine, count: usize) -> Result<String> {
    let path = format!("/api/v1/namespaces/{HOSTILE}/configmaps?watch=true");
    // A connection carries a hundred requests at a time.
    let clients: Vec<_> =
        (0..count.div_ceil(WATCHES_A_CONNECTION)).map(|_| fixture.new_client()).collect::<Result<_>>()?;
    let answers: Vec<_> = stream::iter(0..count)
        .map(|number| fixture.open(&clients[number / WATCHES_A_CONNECTION], HOSTILE, &path))
        .buffer_unordered(OPENING)
        .filter_map(async |answer| answer.ok())
        .collect()
        .await;
    lease_is_renewed(fixture).await?;
    let codes: Vec<u16> = answers.iter().map(|answer| answer.status().as_u16()).collect();
    ensure!(codes.iter().all(|code| [200, 429].contains(code)), "{codes:?}");
    Ok(format!("{} of {count} watch", codes.iter().filter(|code| **code == 200).count()))
}

async fn signing_requests(fixture: &TenantMachine, count: usize) -> Result<String> {
    let token = fixture.join_token().await?;
    let request = rcgen::CertificateParams::new(Vec::<String>::new())?
        .serialize_request(&rcgen::KeyPair::generate()?)?
        .pem()?;
    use base64::Engine as _;
    let request = base64::engine::general_purpose::STANDARD.encode(request);
    let client = fixture.new_client()?;
    let url = format!("{}/apis/certificates.k8s.io/v1/certificatesigningrequests", fixture.url());
    let mut created = 0;
    for number in 0..count {
        let object = json!({"apiVersion": "certificates.k8s.io/v1", "kind": "CertificateSigningRequest",
            "metadata": {"name": format!("flood-{number}")},
            "spec": {"request": request, "signerName": "russet.dev/node", "usages": ["client auth"]}});
        let answer = client.request(Method::POST, &url).bearer_auth(&token).json(&object).send().await?;
        match answer.status().as_u16() {
            201 => created += 1,
            429 => {}
            code => bail!("{code}: {}", answer.text().await?),
        }
    }
    lease_is_renewed(fixture).await?;
    ensure!((1..count).contains(&created), "one token made {created} signing requests");
    Ok(format!("{created} of {count} created"))
}

/// Waits until the Lease of the node was renewed twice; it must not lapse meanwhile.
async fn lease_is_renewed(fixture: &TenantMachine) -> Result<()> {
    let begin = Instant::now();
    let mut renewals = std::collections::BTreeSet::new();
    while renewals.len() < 3 {
        let lease = fixture.get(LEASE).await?;
        let renewed: Timestamp =
            lease["spec"]["renewTime"].as_str().with_context(|| format!("no Lease: {lease}"))?.parse()?;
        let seconds = lease["spec"]["leaseDurationSeconds"].as_i64().context("a Lease without a duration")?;
        let age = Timestamp::now().duration_since(renewed).as_secs();
        ensure!(age < seconds, "the Lease of node-a was renewed {age} s ago and lasts {seconds} s");
        renewals.insert(renewed);
        ensure!(begin.elapsed() < RENEWAL_TIMEOUT, "the Lease of node-a is not renewed: {lease}");
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    Ok(())
}
