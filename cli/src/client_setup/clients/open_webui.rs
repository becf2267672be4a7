//! Open WebUI: OpenAI's dialect, set up by variables of its container.

use crate::client_setup::endpoint::GatewayEndpoint;
use crate::client_setup::requests;
use crate::client_setup::setup::{ClientProgram, ClientSetup};

/// Open WebUI.
pub const CLIENT: ClientProgram = ClientProgram {
    name: "open-webui",
    title: "Open WebUI",
    evidence: "never run against Russet; from its documentation",
    wants_claude_names: false,
    setup,
};

fn setup(endpoint: &GatewayEndpoint) -> ClientSetup {
    let mut steps = vec![
        "The variables count at its first start alone. Later: Admin Settings → Connections → OpenAI API, the same URL \
         and key."
            .to_owned(),
        format!("It lists all models of the gateway; choose {}.", endpoint.model.name),
    ];
    if endpoint.is_loopback() {
        steps.push(
            "In a container 127.0.0.1 is the container: with Docker Desktop write host.docker.internal in its place. \
             On Linux use `--network host`, or open the gateway with --gateway-listen."
                .to_owned(),
        );
    }
    ClientSetup {
        variables: vec![
            ("OPENAI_API_BASE_URL", endpoint.openai_url()),
            ("OPENAI_API_KEY", endpoint.key_or_placeholder()),
            // It would wait for an Ollama that is not there.
            ("ENABLE_OLLAMA_API", "false".to_owned()),
        ],
        steps,
        requests: vec![requests::list_models(), requests::chat(&endpoint.model.name)],
        ..ClientSetup::default()
    }
}
