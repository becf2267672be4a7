//! A backup of a control plane that serves, and its restore under an agent and a gateway that run all the time.

use std::process::Stdio;

use anyhow::{Context, Result, ensure};
use russet_tests::chat;
use russet_tests::cluster::{TestCluster, program};
use serde_json::Value;

use crate::mistakes::apply;
use crate::path::{delete_object, quickstart};

/// A model name that leads to the quickstart's deployment.
fn route(name: &str) -> String {
    format!(
        "apiVersion: russet.dev/v1alpha1\nkind: ModelRoute\nmetadata: {{name: {name}}}\n\
         spec: {{models: [{name}], targets: [{{deploymentRef: {{name: smoke}}}}]}}\n"
    )
}

/// Names of the models that a gateway offers.
async fn models(base_url: &str) -> Result<Vec<String>> {
    let list: Value = chat::client()?.get(format!("{base_url}/models")).send().await?.json().await?;
    let names = list["data"].as_array().into_iter().flatten();
    Ok(names.filter_map(|model| model["id"].as_str().map(str::to_owned)).collect())
}

/// Waits until a gateway offers the first model and not the second.
async fn offers(cluster: &mut TestCluster, base_url: &str, offered: &str, gone: &str) -> Result<()> {
    let has = |names: &[String], name: &str| names.iter().any(|found| found == name);
    cluster
        .until(&format!("the gateway offers {offered} and not {gone}"), async |_| {
            let names = models(base_url).await?;
            Ok(has(&names, offered) && !has(&names, gone))
        })
        .await
}

/// `--api-listen` opens the address that it names and no other one of the machine.
async fn only_one_address_is_open(cluster: &TestCluster) -> Result<()> {
    let Some([wire, _]) = cluster.lab.wire else { return Ok(()) };
    let connect = async |address| tokio::net::TcpStream::connect((address, cluster.api_port)).await;
    connect(cluster.lab.near.address).await.context("the address that was named is closed")?;
    ensure!(connect(wire).await.is_err(), "{wire} is open, though another address was named");
    Ok(())
}

/// What was written after the backup is gone for everybody, and what was deleted after it is back; the next writes
/// reach the agents.
pub async fn restore(cluster: &mut TestCluster) -> Result<()> {
    quickstart(cluster).await?;
    let port = std::net::TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
    let base_url = format!("http://127.0.0.1:{port}/v1");
    // Of its own: the one of `russet up` stops with it.
    let _gateway = tokio::process::Command::new(program("russet")?)
        .args(["gateway", "--exit-with-parent", "--listen", &format!("127.0.0.1:{port}"), "--data-dir"])
        .arg(cluster.near_dir())
        .env_remove("KUBECONFIG")
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .kill_on_drop(true)
        .spawn()?;
    cluster.until("the second gateway answers", async |_| Ok(models(&base_url).await.is_ok())).await?;
    apply(cluster, &route("before")).await?;
    offers(cluster, &base_url, "before", "after").await?;

    let file = cluster.near_dir().join("backup.jsonl").display().to_string();
    let text = cluster.russet(&["backup", &file]).await?;
    print!("  {text}");
    delete_object(cluster, "modelroutes/before").await?;
    apply(cluster, &route("after")).await?;
    offers(cluster, &base_url, "after", "before").await?;

    let data_dir = cluster.near_dir().display().to_string();
    let refused = cluster.russet(&["restore", &file, "--data-dir", &data_dir]).await;
    let refused = refused.err().context("a store was replaced under its server")?.to_string();
    ensure!(refused.contains("nothing was changed"), "{refused}");
    let listen = ["--api-listen".to_owned(), cluster.lab.near.address.to_string()];
    cluster
        .restart_up(&listen, async |cluster| {
            let text = cluster.russet(&["restore", &file, "--data-dir", &data_dir]).await?;
            print!("  {text}");
            Ok(())
        })
        .await?;
    let begin = std::time::Instant::now();
    offers(cluster, &base_url, "before", "after").await?;
    println!("  restored, the gateway that ran has the objects = {:.2}", begin.elapsed().as_secs_f64());
    quickstart(cluster).await?;
    for base_url in [&base_url, &cluster.base_url()] {
        let answer = chat::answer(base_url, "before", "What is 17 + 25?").await?;
        ensure!(answer.contains("42"), "{base_url} says \"{answer}\"");
    }
    only_one_address_is_open(cluster).await?;
    // New ranks on both machines: the agents' watches follow the new history.
    crate::path::delete(cluster).await?;
    quickstart(cluster).await?;
    delete_object(cluster, "modelroutes/before").await
}
