//! What a proxy adds to each chunk of a stream: every token has the time it was made, and the client looks at its clock when
//! it has read it.

use std::time::{Duration, SystemTime};

use crate::arrivals::{every, moments};
use crate::load::{CONNECTIONS, LoadConnection, LoadTarget};
use crate::load_request::{LoadRequest, PACED};
use crate::measure::median;
use crate::roles::PACED_TOKENS;

/// Rounds of every target.
const ROUNDS: usize = 7;
/// Before each time.
pub const MARK: &str = "@";

/// The text of a token that is made now.
pub fn token() -> String {
    format!("{MARK}{:019}", now())
}

fn now() -> u64 {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap();
    u64::try_from(now.as_nanos()).unwrap()
}

/// The median and the 99th percentile of what ours and the peer add, in microseconds: `targets` are direct and through, ours
/// and the peer's.
pub async fn added(targets: [&LoadTarget; 4]) -> [(f64, f64); 2] {
    let mut added: [(Vec<f64>, Vec<f64>); 2] = Default::default();
    for _ in 0..ROUNDS {
        let mut turn = Vec::new();
        for target in targets {
            turn.push(delays(target).await);
        }
        for (quantile, (mine, its)) in [0.5, 0.99].into_iter().zip(&mut added) {
            let of = |delays: &[f64]| delays[((delays.len() - 1) as f64 * quantile).round() as usize];
            mine.push(of(&turn[1]) - of(&turn[0]));
            its.push(of(&turn[3]) - of(&turn[2]));
        }
    }
    added.map(|(mine, its)| (median(mine), median(its)))
}

/// The sorted times from the making of each token to its reading, in microseconds, of a stream on each connection.
async fn delays(target: &LoadTarget) -> Vec<f64> {
    let mut streams = Vec::new();
    // Not all at one moment.
    let mut starts = moments(every(Duration::from_micros(313)));
    for mut connection in LoadConnection::open_all(target, CONNECTIONS).await {
        starts.recv().await.expect("they do not end");
        streams.push(tokio::spawn(async move {
            let mut delays = Vec::new();
            connection
                .exchange(&LoadRequest::answered(PACED), |data| {
                    let read_at = now();
                    let text = String::from_utf8_lossy(data);
                    let made = text.split(MARK).skip(1).map(|made| made[..19].parse::<u64>().unwrap());
                    delays.extend(made.map(|made| read_at.saturating_sub(made) as f64 / 1000.0));
                    true
                })
                .await;
            assert_eq!(delays.len(), PACED_TOKENS as usize);
            delays
        }));
    }
    let mut all = Vec::new();
    for stream in streams {
        all.extend(stream.await.unwrap());
    }
    all.sort_by(f64::total_cmp);
    all
}
