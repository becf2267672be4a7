//! A minimal server: `cargo run -p russet-apiserver --example serve -- DIRECTORY PORT`, until Ctrl-C.

use russet_apiserver::ApiServerConfig;

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    tracing_subscriber::fmt().init();
    let mut arguments = std::env::args().skip(1);
    let folder = arguments.next().ok_or("which directory?")?;
    let port: u16 = arguments.next().unwrap_or_else(|| "6443".into()).parse()?;
    let running =
        russet_apiserver::start(ApiServerConfig::new(folder).listen(([127, 0, 0, 1], port).into())).await?;
    println!("export KUBECONFIG={}", running.kubeconfig().display());
    tokio::signal::ctrl_c().await?;
    running.shutdown().await;
    Ok(())
}
