//! The gateway of this machine's `russet up`: whether it answers, and else what holds its port. Gateways on other
//! machines have no line: nothing here knows of them.

use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use anyhow::Result;

use super::{Finding, Mark};
use crate::data_dir::DataDir;
use crate::port_holder;

/// Timeout of a request to a gateway on this machine.
const TIMEOUT: Duration = Duration::from_secs(5);

/// The finding about the gateway of the control plane whose kubeconfig is in `folder`; `None` where no
/// `russet up` wrote it.
pub(super) async fn finding(folder: &Path) -> Option<Finding> {
    let layout = DataDir::resolve(Some(folder.to_owned())).ok()?;
    let url = std::fs::read_to_string(layout.gateway_address()).ok()?.trim().to_owned();
    let answers = match layout.gateway_answers().exists() {
        true => healthy(&url).await.map_err(|error| format!("it does not answer: {error:#}")),
        false => Err("it has not started to answer".to_owned()),
    };
    let address = url.trim_start_matches("http://").parse().ok();
    Some(decide(&url, answers, address.and_then(|address: SocketAddr| port_holder::describe(address))))
}

async fn healthy(url: &str) -> Result<()> {
    let client = reqwest::Client::builder().no_proxy().timeout(TIMEOUT).build()?;
    client.get(format!("{url}/healthz")).send().await?.error_for_status()?;
    Ok(())
}

/// The line about a gateway.
fn decide(url: &str, answers: Result<(), String>, holder: Option<String>) -> Finding {
    match answers {
        Ok(()) => Finding::new(Mark::Good, "gateway", format!("answers at {url}")),
        Err(why) => {
            let holder = holder.map(|holder| format!("\nits port: {holder}")).unwrap_or_default();
            let words = format!(
                "{url}: {why}; `russet logs gateway` says why, `russet up --gateway-port` names another port{holder}"
            );
            Finding::new(Mark::Bad, "gateway", words)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn gateway_that_does_not_answer_names_the_port_s_holder() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(finding(folder.path()).await, None);
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let layout = DataDir::resolve(Some(folder.path().to_owned())).unwrap();
        std::fs::create_dir_all(layout.gateway()).unwrap();
        let address = listener.local_addr().unwrap();
        std::fs::write(layout.gateway_address(), format!("http://{address}\n")).unwrap();
        let found = finding(folder.path()).await.unwrap();
        assert_eq!(found.mark, Mark::Bad);
        assert!(
            found.words.contains("has not started") && found.words.contains(&address.to_string()),
            "{found:?}"
        );
        #[cfg(target_os = "linux")]
        assert!(found.words.contains(&std::process::id().to_string()), "{found:?}");
        assert_eq!(decide("http://x", Ok(()), None).mark, Mark::Good);
    }
}
