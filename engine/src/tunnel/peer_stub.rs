//! Peer stub: plays a lost neighbour toward MLX. After a loss, MLX's rings fail two operations and the third
//! waits forever, so a rank that is to be reused must hide the loss from MLX. Once its results no longer
//! count, the tunnel sends endless zeros in the neighbour's place until running batches have ended.
//!
//! ```text
//! connected ──peer closes──▶ kept open for a grace period ──▶ closed: MLX sees the loss, as without a tunnel
//!     └───────the group is lost──────┴──▶ zeros in, output discarded ──tunnel dropped──▶ closed
//! ```

use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio::time::timeout;

/// Grace period between the end of a neighbour's connection and the control stream's verdict. A process that
/// dies closes both at once; if the control stream is still open, MLX's error arrives first.
const LOSS_GRACE: Duration = Duration::from_secs(1);

/// Bytes written or read at a time.
const CHUNK_BYTES: usize = 64 << 10;

/// Declares to the directions of a tunnel that the group is lost and its results no longer count.
#[derive(Clone, Debug, Default)]
pub struct StubSwitch(watch::Sender<bool>);

impl StubSwitch {
    /// Declares it.
    pub fn activate(&self) {
        self.0.send_replace(true);
    }

    pub(super) fn subscribe(&self) -> StubSignal {
        StubSignal(self.0.subscribe())
    }
}

/// Receiving side of the switch.
#[derive(Clone, Debug)]
pub(super) struct StubSignal(watch::Receiver<bool>);

impl StubSignal {
    /// Waits until the group is declared lost; never returns if the switch is dropped before.
    pub(super) async fn wait_active(&mut self) {
        if self.0.wait_for(|said| *said).await.is_err() {
            std::future::pending::<()>().await;
        }
    }

    /// Waits until the switch is dropped.
    async fn wait_dropped(&mut self) {
        while self.0.changed().await.is_ok() {}
    }
}

/// Takes over MLX's connection to a lost neighbour.
pub(super) async fn run_stub(local: TcpStream, mut stub_signal: StubSignal) {
    let mut until = stub_signal.clone();
    let playing = async {
        if timeout(LOSS_GRACE, stub_signal.wait_active()).await.is_ok() {
            feed_zeros(local).await;
        }
    };
    tokio::select! {
        () = playing => {}
        () = until.wait_dropped() => {}
    }
}

async fn feed_zeros(mut local: TcpStream) {
    let (mut from, mut to) = local.split();
    let swallow = async {
        let mut piece = vec![0; CHUNK_BYTES];
        while from.read(&mut piece).await.is_ok_and(|length| length > 0) {}
    };
    let zeros = async {
        let zeros = vec![0; CHUNK_BYTES];
        while to.write_all(&zeros).await.is_ok() {}
    };
    tokio::join!(swallow, zeros);
}
