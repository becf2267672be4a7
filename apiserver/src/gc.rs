//! What happens to objects without anybody asking.

use std::sync::Arc;

use tokio::task::JoinHandle;

use crate::api::Api;

/// Starts the controllers.
pub fn spawn(_api: &Arc<Api>) -> Vec<JoinHandle<()>> {
    Vec::new()
}
