//! `russet delete`: deletes one object by name.

use anyhow::{Context, Result};
use serde_json::Value;

use crate::client::Connection;
use crate::resources;

/// Arguments of `russet delete`.
#[derive(clap::Args)]
pub struct Arguments {
    /// `resource/name`, such as `modeldeployment/smoke`.
    object: String,
    #[command(flatten)]
    connection: Connection,
}

/// Asks the server; finalizers and dependants are the server's business.
pub async fn run(arguments: Arguments) -> Result<()> {
    let (word, name) = arguments.object.split_once('/').context("name the object as resource/name")?;
    let client = arguments.connection.client().await?;
    let all = resources::discover(&client).await?;
    let found = resources::named(&all, word)?;
    let resource = found.first().context("no such resource")?;
    let request =
        http::Request::delete(resource.object(&arguments.connection.namespace, name)).body(Vec::new())?;
    client.request::<Value>(request).await?;
    println!("{} deleted", arguments.object);
    Ok(())
}
