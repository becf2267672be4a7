//! Admin endpoints: `/metrics` in Prometheus' text format, `/healthz` (the event loop runs) and `/readyz`
//! (the process can do its work). They show no secrets and no settings.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, Uri, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use prometheus::{Encoder as _, Registry, TextEncoder};

use crate::process;

/// What `/readyz` says.
#[derive(Clone)]
pub struct Readiness {
    /// Whether the process can do its work.
    pub ready: Arc<AtomicBool>,
    /// What is wrong, in lines; empty if nothing is. It is said whether the process is ready or not.
    pub problems: Arc<dyn Fn() -> String + Send + Sync>,
}

impl From<Arc<AtomicBool>> for Readiness {
    fn from(ready: Arc<AtomicBool>) -> Self {
        Self { ready, problems: Arc::new(String::new) }
    }
}

/// `/metrics`, `/healthz` and `/readyz` as routes, for a process that has a listener. Adds the process
/// metrics to `registry`.
pub fn router(registry: Registry, ready: impl Into<Readiness>) -> Router {
    // An error means that they are registered already, by an earlier router over the same registry.
    let _ = registry.register(Box::new(process::ProcessMetrics::new()));
    Router::new()
        .route("/metrics", get(metrics))
        .with_state(registry)
        .route("/healthz", get(|| async { "ok\n" }))
        .route("/readyz", get(readyz).with_state(ready.into()))
}

/// An additional page of a process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Page {
    /// Its HTTP content type.
    pub content_type: String,
    /// Its body.
    pub text: String,
}

/// Returns the page of a path, or `None`.
pub type Pages = Arc<dyn Fn(String) -> Pin<Box<dyn Future<Output = Option<Page>> + Send>> + Send + Sync>;

/// [`router`] with additional pages.
pub fn router_with(registry: Registry, ready: impl Into<Readiness>, pages: Pages) -> Router {
    router(registry, ready).fallback(move |uri: Uri| async move {
        match pages(uri.path().to_owned()).await {
            Some(Page { content_type, text }) => {
                ([(header::CONTENT_TYPE, content_type)], text).into_response()
            }
            None => (StatusCode::NOT_FOUND, "no such path\n").into_response(),
        }
    })
}

/// Serves [`router_with`] on `listener` until the future is dropped.
pub async fn serve_with(
    listener: tokio::net::TcpListener,
    registry: Registry,
    ready: impl Into<Readiness>,
    pages: Pages,
) -> std::io::Result<()> {
    axum::serve(listener, router_with(registry, ready, pages)).await
}

/// Serves [`router`] on `listener` until the future is dropped.
pub async fn serve(
    listener: tokio::net::TcpListener,
    registry: Registry,
    ready: impl Into<Readiness>,
) -> std::io::Result<()> {
    axum::serve(listener, router(registry, ready)).await
}

async fn metrics(State(registry): State<Registry>) -> Response {
    let encoder = TextEncoder::new();
    let mut text = Vec::new();
    match encoder.encode(&registry.gather(), &mut text) {
        Ok(()) => ([(header::CONTENT_TYPE, encoder.format_type().to_owned())], text).into_response(),
        Err(error) => {
            (StatusCode::INTERNAL_SERVER_ERROR, format!("the metrics cannot be encoded as text: {error}\n"))
                .into_response()
        }
    }
}

async fn readyz(State(Readiness { ready, problems }): State<Readiness>) -> Response {
    let (status, word) = match ready.load(Ordering::Acquire) {
        true => (StatusCode::OK, "ok"),
        false => (StatusCode::SERVICE_UNAVAILABLE, "not ready"),
    };
    let problems = problems();
    let line_end = if problems.is_empty() { "" } else { "\n" };
    (status, format!("{word}\n{problems}{line_end}")).into_response()
}

#[cfg(test)]
mod tests {
    use axum::body::Body;
    use axum::http::Request;
    use http_body_util::BodyExt as _;
    use tower::ServiceExt as _;

    use super::*;

    async fn get_path(router: &Router, path: &str) -> (StatusCode, String) {
        let request = Request::get(path).body(Body::empty()).unwrap();
        let response = router.clone().oneshot(request).await.unwrap();
        let status = response.status();
        let body = response.into_body().collect().await.unwrap().to_bytes();
        (status, String::from_utf8(body.to_vec()).unwrap())
    }

    #[tokio::test]
    async fn readiness_follows_the_flag_and_health_does_not() {
        let ready = Arc::new(AtomicBool::new(false));
        let router = router(Registry::new(), ready.clone());
        assert_eq!(get_path(&router, "/healthz").await.0, StatusCode::OK);
        assert_eq!(
            get_path(&router, "/readyz").await,
            (StatusCode::SERVICE_UNAVAILABLE, "not ready\n".into())
        );
        ready.store(true, Ordering::Release);
        assert_eq!(get_path(&router, "/readyz").await, (StatusCode::OK, "ok\n".into()));
    }

    #[tokio::test]
    async fn readiness_names_what_is_wrong() {
        let ready = Arc::new(AtomicBool::new(false));
        let problems = Arc::new(|| "Lease objects are not listed".to_owned());
        let router = router(Registry::new(), Readiness { ready: ready.clone(), problems });
        let (status, text) = get_path(&router, "/readyz").await;
        assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE);
        assert_eq!(text, "not ready\nLease objects are not listed\n");
        ready.store(true, Ordering::Release);
        let (status, text) = get_path(&router, "/readyz").await;
        assert_eq!((status, text.as_str()), (StatusCode::OK, "ok\nLease objects are not listed\n"));
    }

    #[tokio::test]
    async fn admin_router_serves_additional_pages() {
        let pages: Pages = Arc::new(|path| {
            Box::pin(async move {
                let text = path.strip_prefix("/engines/")?.to_owned();
                Some(Page { content_type: "text/plain".into(), text })
            })
        });
        let router = router_with(Registry::new(), Arc::new(AtomicBool::new(true)), pages);
        assert_eq!(get_path(&router, "/engines/x").await, (StatusCode::OK, "x".into()));
        assert_eq!(get_path(&router, "/elsewhere").await.0, StatusCode::NOT_FOUND);
        assert_eq!(get_path(&router, "/healthz").await.0, StatusCode::OK);
    }

    #[tokio::test]
    async fn metrics_show_registry_and_process_with_shared_registry() {
        let registry = Registry::new();
        let counter = prometheus::IntCounter::new("russet_test_total", "Things.").unwrap();
        registry.register(Box::new(counter.clone())).unwrap();
        counter.inc_by(3);
        let ready = Arc::new(AtomicBool::new(true));
        let _first = router(registry.clone(), ready.clone());
        let second = router(registry, ready);
        let (status, text) = get_path(&second, "/metrics").await;
        assert_eq!(status, StatusCode::OK);
        assert!(text.contains("\nrusset_test_total 3\n"), "{text}");
        assert_eq!(text.matches("# TYPE process_start_time_seconds gauge").count(), 1, "{text}");
        #[cfg(target_os = "linux")]
        assert!(text.contains("\nprocess_resident_memory_bytes "), "{text}");
    }
}
