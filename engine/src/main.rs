//! The engine process: parses flags, runs the library and maps the outcome to an exit code. It decides
//! nothing itself.

#[cfg(not(feature = "mlx"))]
fn main() -> anyhow::Result<()> {
    anyhow::bail!(
        "this russet-engine was built without MLX and cannot compute; build it with the feature `mlx`"
    )
}

#[cfg(feature = "mlx")]
fn main() -> anyhow::Result<()> {
    engine::main()
}

#[cfg(feature = "mlx")]
mod engine {
    use std::sync::Arc;

    use anyhow::Context as _;
    use clap::Parser as _;
    use russet_engine::args::{Args, Dtype, Fence, LogFormat, Switch};
    use russet_engine::lifecycle::Lifecycle;
    use russet_engine::process::{EngineProcess, ExitOutcome};
    use russet_engine::runtime::environment::{self, MlxEnvironment};
    use russet_engine::runtime::{DiskCacheConfig, Runtime, RuntimeConfig};
    use russet_engine::weights::LoadDtype;
    use tokio::signal::unix::{SignalKind, signal};
    use tokio::task::AbortHandle;

    pub fn main() -> anyhow::Result<()> {
        let args = Args::parse();
        // Before any thread exists: this may re-exec the process.
        environment::ensure(mlx_environment(&args).as_ref()).context("cannot set MLX's environment")?;
        russet_telemetry::logs::init(&format!("engine-{}", args.rank), args.log == LogFormat::Json);
        // Already installed only if other code in this process did so, with the same provider.
        let _ = rustls::crypto::ring::default_provider().install_default();
        // They carry the traffic between ranks, beside MLX's threads that wait for it.
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .on_thread_start(russet_mlx::request_low_latency)
            .enable_all()
            .build()?;
        let outcome = runtime.block_on(run(args));
        let code = match outcome {
            Ok(None) => 0,
            Ok(Some(reason)) => {
                tracing::error!(reason, "exiting");
                1
            }
            Err(error) => {
                tracing::error!("{error:#}");
                2
            }
        };
        // The MLX thread may block in a collective forever; only the end of the process ends it.
        russet_mlx::exit_immediately(code)
    }

    /// The environment that MLX reads for this rank.
    fn mlx_environment(args: &Args) -> Option<MlxEnvironment> {
        // Contradictory flags are refused later, once the log works.
        let coordinator = || args.tensor_hosts.get((args.rank - args.rank % args.tensor_size) as usize);
        let jaccl = args.backend.topology().and_then(|topology| Some((*coordinator()?, topology)));
        let (files, fast_fence) = (args.control_socket.clone(), args.fence == Fence::Fast);
        (args.size() > 1).then_some(MlxEnvironment { rank: args.rank, files, jaccl, fast_fence })
    }

    /// Runs one formation of the group after another, as long as the weights can be reused; returns why the
    /// last one failed, if it did.
    async fn run(mut args: Args) -> anyhow::Result<Option<String>> {
        let compute = Runtime::start(RuntimeConfig {
            model_dir: args.model_dir.clone(),
            layers_per_rank: (!args.layers_per_rank.is_empty()).then(|| args.layers_per_rank.clone()),
            tensor_size: args.tensor_size,
            rank: args.rank,
            devices: args.backend.topology().map(|_| args.rdma_devices.clone()),
            dtype: match args.dtype {
                Dtype::Auto => LoadDtype::AsStored,
                Dtype::F32 => LoadDtype::Float32,
            },
            kv_cache: args.kv_cache,
            blas_threads: std::thread::available_parallelism().map_or(1, usize::from),
            overlap: args.look_ahead,
            wired: args.wired_memory == Switch::On,
            disk_cache: args
                .prefix_dir
                .clone()
                .filter(|_| args.prefix_cache == Switch::On)
                .map(|folder| DiskCacheConfig { folder, max_bytes: args.prefix_dir_bytes }),
            draft_dir: args.draft_dir.clone(),
        })
        .context("cannot start the MLX thread")?;
        let compute = Arc::new(compute);
        loop {
            let epoch = args.epoch;
            let rank = EngineProcess::bind(args, compute.clone()).await?;
            tracing::info!(address = %rank.address()?, pid = std::process::id(), epoch, "listening");
            let signals = watch_signals(rank.life())?;
            let outcome = rank.run().await?;
            signals.abort();
            args = match outcome {
                ExitOutcome::Stopped => return Ok(None),
                ExitOutcome::Failed(reason) => return Ok(Some(reason)),
                ExitOutcome::Reform(next) => *next,
            };
        }
    }

    fn watch_signals(life: Lifecycle) -> anyhow::Result<AbortHandle> {
        let mut terminate = signal(SignalKind::terminate())?;
        let mut interrupt = signal(SignalKind::interrupt())?;
        let signals = tokio::spawn(async move {
            tokio::select! {
                _ = terminate.recv() => life.drain("it got SIGTERM"),
                _ = interrupt.recv() => life.drain("it got SIGINT"),
            }
        });
        Ok(signals.abort_handle())
    }
}
