//! MLX's end of a way whose other end is lost. MLX's rings fail two operations after that and let the next one wait for
//! ever, so a rank that is to be of use to another group must not let MLX see the loss: once nobody believes what is
//! computed any more, the tunnel plays the neighbour's part, with zeros without end, until what was begun has ended.
//!
//! ```text
//! connected ──the other end closes──▶ kept open for a moment ──▶ closed: MLX sees the loss, as without a tunnel
//!     └──────────────the group is lost──────────┴──▶ zeros in, nothing out ──the tunnel is dropped──▶ closed
//! ```

use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio::time::timeout;

/// Between the end of a neighbour's connection and what the control path says of it. A process that died closes both at
/// once; where the other is still open, MLX's error is the first that is heard.
const LOSS_GRACE: Duration = Duration::from_secs(1);

/// Bytes written or read at a time.
const CHUNK_BYTES: usize = 64 << 10;

/// Says to the ways of a tunnel that the group is lost and nothing of it is believed any more.
#[derive(Clone, Debug, Default)]
pub struct StubSwitch(watch::Sender<bool>);

impl StubSwitch {
    /// From now on.
    pub fn activate(&self) {
        self.0.send_replace(true);
    }

    pub(super) fn subscribe(&self) -> StubSignal {
        StubSignal(self.0.subscribe())
    }
}

/// Hears it.
#[derive(Clone, Debug)]
pub(super) struct StubSignal(watch::Receiver<bool>);

impl StubSignal {
    /// Waits until it is said; never where nobody is left to say it.
    pub(super) async fn wait_active(&mut self) {
        if self.0.wait_for(|said| *said).await.is_err() {
            std::future::pending::<()>().await;
        }
    }

    /// Waits until nobody is left to say anything.
    async fn wait_dropped(&mut self) {
        while self.0.changed().await.is_ok() {}
    }
}

/// Takes MLX's end over, whose neighbour is lost.
pub(super) async fn run_stub(local: TcpStream, mut told: StubSignal) {
    let mut until = told.clone();
    let playing = async {
        if timeout(LOSS_GRACE, told.wait_active()).await.is_ok() {
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
