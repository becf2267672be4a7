//! The engine process: reads its configuration, runs the library and maps the outcome to an exit code. It decides
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
    use std::path::{Path, PathBuf};
    use std::sync::Arc;

    use anyhow::Context as _;
    use clap::Parser;
    use clap::error::ErrorKind;
    use russet_engine::jaccl::{Devices, Topology};
    use russet_engine::layers;
    use russet_engine::lifecycle::Lifecycle;
    use russet_engine::process::{EngineProcess, ExitOutcome};
    use russet_engine::runtime::environment::{self, MlxEnvironment};
    use russet_engine::runtime::{DiskCacheConfig, Runtime, RuntimeConfig};
    use russet_engine::weights::LoadDtype;
    use russet_model::load_quantization::LoadQuantization;
    use russet_wire::engine_config::{Dtype, EngineConfig, LogFormat};
    use russet_wire::engine_options::{Fence, WeightQuantization};
    use tokio::signal::unix::{SignalKind, signal};
    use tokio::task::AbortHandle;

    /// Exit code for a configuration or sockets that cannot be used.
    const UNUSABLE: i32 = 2;

    /// One rank of a group that serves a model. The agent writes its configuration and starts it.
    #[derive(Debug, Parser)]
    #[command(name = "russet-engine", version)]
    struct Args {
        /// The configuration: a JSON object with the fields that --config-schema describes.
        #[arg(long, value_name = "FILE", required_unless_present = "config_schema")]
        config: Option<PathBuf>,
        /// Print the JSON Schema of the configuration: every field, with its meaning and default.
        #[arg(long)]
        config_schema: bool,
    }

    pub fn main() -> anyhow::Result<()> {
        let arguments = Args::try_parse().unwrap_or_else(|error| {
            if error.kind() != ErrorKind::UnknownArgument {
                error.exit()
            }
            // The agent reports the last line of the log.
            eprintln!("{error}");
            eprintln!(
                "this russet-engine takes --config FILE; an agent that gives it flags is of an older release: restart the agent"
            );
            std::process::exit(UNUSABLE)
        });
        // clap has required it, unless the schema is asked for.
        let Args { config: Some(file), config_schema: false } = arguments else {
            println!("{:#}", EngineConfig::json_schema());
            return Ok(());
        };
        let config = read(&file).unwrap_or_else(|error| {
            // One line: the agent reports the last one of the log.
            eprintln!("{}: {error:#}", file.display());
            std::process::exit(UNUSABLE)
        });
        // Before any thread exists: this may re-exec the process.
        environment::ensure(mlx_environment(&config).as_ref()).context("cannot set MLX's environment")?;
        russet_telemetry::logs::init(&format!("engine-{}", config.rank), config.log == LogFormat::Json);
        // Already installed only if other code in this process did so, with the same provider.
        let _ = rustls::crypto::ring::default_provider().install_default();
        // They carry the traffic between ranks, beside MLX's threads that wait for it.
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .on_thread_start(russet_mlx::request_low_latency)
            .enable_all()
            .build()?;
        let outcome = runtime.block_on(run(config));
        let code = match outcome {
            Ok(None) => 0,
            Ok(Some(reason)) => {
                tracing::error!(reason, "exiting");
                1
            }
            Err(error) => {
                tracing::error!("{error:#}");
                UNUSABLE
            }
        };
        // The MLX thread may block in a collective forever; only the end of the process ends it.
        russet_mlx::exit_immediately(code)
    }

    fn read(file: &Path) -> anyhow::Result<EngineConfig> {
        let text = std::fs::read_to_string(file).context("the configuration cannot be read")?;
        Ok(EngineConfig::from_json(&text)?)
    }

    /// The environment that MLX reads for this rank.
    fn mlx_environment(config: &EngineConfig) -> Option<MlxEnvironment> {
        // Contradictory fields are refused later, once the log works.
        let coordinator =
            || config.tensor_hosts.get((config.rank - config.rank % config.tensor_size) as usize);
        let jaccl = Topology::of(config.backend).and_then(|topology| Some((*coordinator()?, topology)));
        let (files, fast_fence) = (config.control_socket.clone(), config.options.fence == Fence::Fast);
        (config.size() > 1).then_some(MlxEnvironment { rank: config.rank, files, jaccl, fast_fence })
    }

    /// Runs one formation of the group after another, as long as the weights can be reused; returns why the
    /// last one failed, if it did.
    async fn run(mut config: EngineConfig) -> anyhow::Result<Option<String>> {
        let compute = Runtime::start(RuntimeConfig {
            model_dir: config.model_dir.clone(),
            layers_per_rank: (!config.layers_per_rank.is_empty()).then(|| config.layers_per_rank.clone()),
            tensor_size: config.tensor_size,
            rank: config.rank,
            devices: Topology::of(config.backend).map(|_| Devices(config.rdma_devices.clone())),
            dtype: match config.dtype {
                Dtype::Auto if layers::on_gpu().unwrap_or_default() => LoadDtype::AsStored,
                Dtype::Auto => LoadDtype::AsStoredWide,
                Dtype::F32 => LoadDtype::Float32,
            },
            quantization: match config.options.quantization {
                WeightQuantization::Int8 => Some(LoadQuantization::Int8),
                WeightQuantization::Int4 => Some(LoadQuantization::Int4),
                // The agent starts no engine with a value that it does not know.
                WeightQuantization::AsStored | WeightQuantization::Unknown => None,
            },
            kv_cache: config.options.kv_cache,
            router_broadcast: config.options.router_broadcast,
            blas_threads: std::thread::available_parallelism().map_or(1, usize::from),
            overlap: config.overlap_scheduling,
            wired: config.wired_memory,
            disk_cache: config
                .prefix_dir
                .clone()
                .filter(|_| config.prefix_cache)
                .map(|folder| DiskCacheConfig { folder, max_bytes: config.prefix_dir_bytes }),
            draft_dir: config.draft_dir.clone(),
            adapters: config.adapters.clone(),
        })
        .context("cannot start the MLX thread")?;
        let compute = Arc::new(compute);
        loop {
            let epoch = config.epoch;
            let rank = EngineProcess::bind(config, compute.clone()).await?;
            tracing::info!(address = %rank.address()?, pid = std::process::id(), epoch, "listening");
            let signals = watch_signals(rank.life())?;
            let outcome = rank.run().await?;
            signals.abort();
            config = match outcome {
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
