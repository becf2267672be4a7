//! Xcode's coding assistant: OpenAI's dialect. Its providers are set up in its window alone.

use crate::client_setup::endpoint::GatewayEndpoint;
use crate::client_setup::requests;
use crate::client_setup::setup::{ClientProgram, ClientSetup};

/// Xcode.
pub const CLIENT: ClientProgram = ClientProgram {
    name: "xcode",
    title: "Xcode",
    evidence: "never run against Russet; from instructions of others for Xcode 26 and 27",
    wants_claude_names: false,
    setup,
};

fn setup(endpoint: &GatewayEndpoint) -> ClientSetup {
    let port = endpoint.url.rsplit_once(':').map_or("", |(_, port)| port);
    let provider = match (endpoint.is_loopback(), &endpoint.key) {
        (true, None) => format!("Locally Hosted. Port: {port}; description: Russet."),
        (_, key) => format!(
            "Internet Hosted. URL: {}; API key: {}; API key header: Authorization; description: Russet.",
            endpoint.url,
            // Xcode sends the field as it is.
            key.as_ref().map_or_else(|| "none".to_owned(), |key| format!("Bearer {key}")),
        ),
    };
    ClientSetup {
        steps: vec![
            "In Xcode: Settings → Intelligence → Add a Chat Provider (in earlier versions Add a Model Provider)."
                .to_owned(),
            provider,
            format!("In the assistant, choose {} of Russet.", endpoint.model.name),
        ],
        requests: vec![requests::list_models(), requests::chat(&endpoint.model.name)],
        ..ClientSetup::default()
    }
}
