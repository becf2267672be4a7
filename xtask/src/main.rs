//! The workspace's own commands: `cargo xtask <verb>`. It is not shipped.

mod mlx;

fn main() -> anyhow::Result<()> {
    match std::env::args().nth(1).as_deref() {
        Some("setup") => {
            let prepared = mlx::prepare()?;
            println!("mlx: ready; build the engine with: cargo {} build -p russet-engine", prepared.cargo_args().join(" "));
            Ok(())
        }
        _ => anyhow::bail!("usage: cargo xtask setup"),
    }
}
