//! The process of one rank. It reads its flags, gives them to the library and turns the outcome
//! into an exit code; it decides nothing itself.

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
    use russet_engine::runtime::environment::{self, MlxEnvironment};
    use russet_engine::runtime::{Runtime, RuntimeConfig, DiskCacheConfig};
    use russet_engine::process::{ExitOutcome, EngineProcess};
    use russet_engine::weights::LoadDtype;
    use tokio::signal::unix::{SignalKind, signal};
    use tokio::task::AbortHandle;

    pub fn main() -> anyhow::Result<()> {
        let args = Args::parse();
        // Before any thread exists: this may replace the process by itself.
        environment::ensure(mlx_environment(&args).as_ref()).context("cannot set MLX's environment")?;
        russet_telemetry::logs::init(&format!("engine-{}", args.rank), args.log == LogFormat::Json);
        // Installed already only if something else in this process did; all of it is the same provider.
        let _ = rustls::crypto::ring::default_provider().install_default();
        // They carry what ranks send each other, beside MLX's threads that wait for it.
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
        // The MLX thread may be blocked in a collective for ever; only the end of the process ends it.
        russet_mlx::exit_immediately(code)
    }

    /// What MLX reads of this rank.
    fn mlx_environment(args: &Args) -> Option<MlxEnvironment> {
        // Flags that do not fit each other are refused later, where the log is.
        let coordinator = || args.tensor_hosts.get((args.rank - args.rank % args.tensor_size) as usize);
        let jaccl = args.backend.topology().and_then(|topology| Some((*coordinator()?, topology)));
        let (files, fast_fence) = (args.control_socket.clone(), args.fence == Fence::Fast);
        (args.size() > 1).then_some(MlxEnvironment { rank: args.rank, files, jaccl, fast_fence })
    }

    /// One formation of the group after the other, as long as the weights are of use; why the last one failed, if it did.
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
