//! Many streams at once.

use tokio::sync::mpsc;
use tokio::task::JoinSet;

use crate::load::{LoadConnection, LoadTarget};
use crate::load_request::{ENDLESS, LoadRequest};

/// How many.
pub const STREAMS: usize = 1000;

/// Opens the streams; returns when each has had its first token. They end when this is dropped.
pub async fn hold(target: &LoadTarget) -> JoinSet<()> {
    let (begun, mut beginning) = mpsc::channel(STREAMS);
    let mut streams = JoinSet::new();
    for mut connection in LoadConnection::open_all(target, STREAMS).await {
        let begun = begun.clone();
        streams.spawn(async move {
            let mut first = Some(begun);
            connection
                .exchange(&LoadRequest::answered(ENDLESS), |data| {
                    if data.windows(4).any(|window| window == b"word")
                        && let Some(begun) = first.take()
                    {
                        begun.try_send(()).unwrap();
                    }
                    true
                })
                .await;
        });
    }
    drop(begun);
    for _ in 0..STREAMS {
        beginning.recv().await.expect("every stream begins");
    }
    streams
}
