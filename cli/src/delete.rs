//! `russet delete`: deletes one object by name.

use anyhow::Result;
use serde_json::Value;

use crate::client::Connection;
use crate::resources;
use crate::stdout::outln;

/// Arguments of `russet delete`.
#[derive(clap::Args)]
pub struct Arguments {
    /// `resource/name`, such as `modeldeployment/smoke`, or the resource alone and the name behind it.
    object: String,
    /// Name of the object.
    name: Option<String>,
    #[command(flatten)]
    connection: Connection,
}

/// Asks the server to delete the object. Finalizers and dependants are left to the server.
pub async fn run(arguments: Arguments) -> Result<()> {
    let client = arguments.connection.client().await?;
    let object = match &arguments.name {
        Some(name) => format!("{}/{name}", arguments.object),
        None => arguments.object,
    };
    let path = resources::path_of(&client, &object, &arguments.connection.namespace()).await?;
    let request = http::Request::delete(path).body(Vec::new())?;
    client.request::<Value>(request).await?;
    outln!("{object} deleted")?;
    Ok(())
}
