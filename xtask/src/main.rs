//! The workspace's own commands: `cargo xtask <verb>`. It is not shipped.

mod mlx;
mod python;

fn main() -> anyhow::Result<()> {
    match std::env::args().nth(1).as_deref() {
        Some("setup") => {
            let prepared = mlx::prepare()?;
            println!(
                "mlx: ready; build the engine with: cargo {} build -p russet-engine",
                prepared.cargo_args().join(" ")
            );
            Ok(())
        }
        // The prepared Python with the caller's arguments: what trains and measures the smoke model.
        Some("python") => {
            let status = python::prepare()?
                .command()
                .args(std::env::args_os().skip(2))
                .status()?;
            anyhow::ensure!(status.success(), "python ended with {status}");
            Ok(())
        }
        _ => anyhow::bail!("usage: cargo xtask setup | python ARGS"),
    }
}
