//! Graceful shutdown of an engine without interrupting its responses. Engines of an ended epoch are killed
//! instead: their group is broken, and the next one waits for the memory.

use std::path::PathBuf;
use std::time::Duration;

use russet_rpc::engine as pb;
use russet_rpc::engine::control_client::ControlClient;
use tokio::task::AbortHandle;

use super::record::ProcessIdentity;

/// Time that an engine gives running responses; passed to it at its start.
pub const DRAIN_TIMEOUT: Duration = Duration::from_secs(30);
/// Time after which a draining engine counts as hung: its own drain timeout, and some for the exit.
pub const KILL_TIMEOUT: Duration = Duration::from_secs(40);
/// RPC timeout of the request itself, over a socket of this machine.
const RPC_TIMEOUT: Duration = Duration::from_secs(5);
/// Poll interval for a process that may not be a child of this agent.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// A shutdown in progress. When dropped, the engine is left alone; a restarted agent repeats the request.
#[derive(Debug)]
pub struct Shutdown(AbortHandle);

impl Drop for Shutdown {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Asks the engine behind `socket` to drain and exit, and kills it after `timeout`, or at once when the
/// request fails.
pub fn graceful(process: ProcessIdentity, socket: PathBuf, timeout: Duration) -> Shutdown {
    let task = tokio::spawn(async move {
        let mut client = ControlClient::new(russet_rpc::tls::unix_channel(socket));
        match tokio::time::timeout(RPC_TIMEOUT, client.stop(pb::StopRequest {})).await {
            Ok(Ok(_)) => {
                let gone = async {
                    while process.alive(&process.boot_id) {
                        tokio::time::sleep(POLL_INTERVAL).await;
                    }
                };
                if tokio::time::timeout(timeout, gone).await.is_err() {
                    let seconds = timeout.as_secs();
                    tracing::warn!(pid = process.pid, "engine did not end within {seconds} s and is killed");
                }
            }
            Ok(Err(status)) => {
                tracing::debug!(pid = process.pid, %status, "engine takes no request to stop and is killed");
            }
            Err(_) => tracing::warn!(
                pid = process.pid,
                "engine did not answer a request to stop within {} s and is killed",
                RPC_TIMEOUT.as_secs()
            ),
        }
        // Whatever the result of the request; an exited process is not signalled.
        process.kill(&process.boot_id);
    });
    Shutdown(task.abort_handle())
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
    use std::pin::Pin;
    use std::process::{ChildStdin, Command, Stdio};
    use std::sync::Mutex;

    use futures::Stream;
    use russet_rpc::engine::control_server::{Control, ControlServer};
    use tokio_stream::wrappers::UnixListenerStream;
    use tonic::{Request, Response, Status};

    use super::*;

    /// Control service of a `cat`, which exits when its input closes.
    struct StubEngine {
        input: Mutex<Option<ChildStdin>>,
        obeys: bool,
    }

    #[tonic::async_trait]
    impl Control for StubEngine {
        type WatchStream = Pin<Box<dyn Stream<Item = Result<pb::EngineState, Status>> + Send>>;

        async fn watch(&self, _: Request<pb::WatchRequest>) -> Result<Response<Self::WatchStream>, Status> {
            Err(Status::unimplemented("nobody watches here"))
        }

        async fn stop(&self, _: Request<pb::StopRequest>) -> Result<Response<pb::StopReply>, Status> {
            if self.obeys {
                drop(self.input.lock().unwrap().take());
            }
            Ok(Response::new(pb::StopReply {}))
        }

        async fn disband(
            &self,
            _: Request<pb::DisbandRequest>,
        ) -> Result<Response<pb::DisbandReply>, Status> {
            Err(Status::unimplemented("nobody forms groups here"))
        }

        async fn form(&self, _: Request<pb::FormRequest>) -> Result<Response<pb::FormReply>, Status> {
            Err(Status::unimplemented("nobody forms groups here"))
        }
    }

    /// Exit status of a `cat` after a shutdown; its engine listens or does not.
    async fn end(listens: bool, obeys: bool, patience: Duration) -> std::process::ExitStatus {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("control.sock");
        let mut child = Command::new("cat").stdin(Stdio::piped()).process_group(0).spawn().unwrap();
        let engine = StubEngine { input: Mutex::new(child.stdin.take()), obeys };
        let process = ProcessIdentity::from_pid(child.id(), "boot").unwrap();
        // The service holds the input in either case, so `cat` does not exit by itself.
        let listener = tokio::net::UnixListener::bind(folder.path().join("other.sock")).unwrap();
        if listens {
            std::fs::rename(folder.path().join("other.sock"), &socket).unwrap();
        }
        let service = tonic::transport::Server::builder()
            .add_service(ControlServer::new(engine))
            .serve_with_incoming(UnixListenerStream::new(listener));
        let service = tokio::spawn(service);
        let ending = graceful(process, socket, patience);
        let status = tokio::task::spawn_blocking(move || child.wait().unwrap());
        let status = tokio::time::timeout(Duration::from_secs(60), status).await;
        drop(ending);
        service.abort();
        status.expect("the process ended").unwrap()
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn engine_stops_gracefully_or_is_killed() {
        let long = Duration::from_secs(3600);
        assert_eq!(end(true, true, long).await.code(), Some(0), "it was killed although it obeyed");
        let killed = Some(9);
        assert_eq!(end(true, false, Duration::from_millis(50)).await.signal(), killed, "it did not obey");
        assert_eq!(end(false, true, long).await.signal(), killed, "nobody listened");
    }
}
