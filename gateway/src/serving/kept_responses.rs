//! What the gateway keeps of responses, as one caller sees it: its own, in the store and in the background.

use std::sync::Arc;
use std::time::Duration;

use axum::http::HeaderMap;
use bytes::Bytes;

use crate::background::{BackgroundResponses, EventLog, RunningResponse};
use crate::batches::Batches;
use crate::body_budget::{BodyBudget, BodyPermit};
use crate::error::{ErrorKind, GatewayError, RETRY_AFTER};
use crate::inbox::Inbox;
use crate::keys::Caller;
use crate::metrics::Metrics;
use crate::offline::OfflineContext;
use crate::request_id::RequestId;
use crate::response_store::{
    ConversationError, ConversationLimits, EventChunk, InboxBody, InboxRow, InboxState, NewRow,
    ResponseStore, ResponseStoreConfig, ResponseStoreError, StoredBody, StoredTurn,
};

/// The longest conversation: as many turns as an agent takes in days, and as many bytes as a body.
const CONVERSATION: ConversationLimits = ConversationLimits { turns: 1000, bytes: 16 << 20 };

/// Everything that is kept.
pub(crate) struct KeptResponses {
    pub(super) store: Arc<ResponseStore>,
    background: Arc<BackgroundResponses>,
    pub(super) batches: Arc<Batches>,
    pub(super) inbox: Arc<Inbox>,
}

impl KeptResponses {
    /// What this store keeps; nothing runs yet. Blocks.
    pub(crate) fn open(
        config: &ResponseStoreConfig,
        metrics: Arc<Metrics>,
    ) -> Result<Self, ResponseStoreError> {
        let store = Arc::new(ResponseStore::open(config)?);
        let batches = Arc::new(Batches::open(store.clone())?);
        let inbox = Arc::new(Inbox::open(store.clone(), metrics)?);
        Ok(Self { store, background: Arc::default(), batches, inbox })
    }

    /// Runs what is kept and has not ended, until `context.stopping`.
    pub(crate) async fn run(self: Arc<Self>, context: OfflineContext) {
        tokio::join!(self.batches.clone().run(context.clone()), self.inbox.clone().run(context));
    }

    /// Where it is.
    pub(crate) fn store(&self) -> Arc<ResponseStore> {
        self.store.clone()
    }

    /// The inbox.
    pub(crate) fn inbox(&self) -> Arc<Inbox> {
        self.inbox.clone()
    }

    /// Waits until nothing runs in the background.
    pub(crate) async fn idle(&self) {
        self.background.idle().await;
    }
}

/// What one caller keeps.
#[derive(Clone)]
pub(crate) struct OwnResponses {
    kept: Arc<KeptResponses>,
    owner: String,
    caller: Caller,
    bodies: BodyBudget,
    /// Time between keep-alives of a stream.
    keep_alive: Duration,
    /// The request that asks for one more.
    request: Option<Arc<ReplayableRequest>>,
}

/// A request as it came, to be sent again where the gateway ends before its response does.
pub(crate) struct ReplayableRequest {
    pub(crate) id: RequestId,
    pub(crate) path: String,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Bytes,
}

impl std::fmt::Debug for OwnResponses {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("OwnResponses").field("owner", &self.owner).finish_non_exhaustive()
    }
}

impl OwnResponses {
    /// What this caller keeps; what it reads counts against the budget of bodies.
    pub(super) fn new(
        kept: Arc<KeptResponses>,
        caller: &Caller,
        bodies: BodyBudget,
        keep_alive: Duration,
    ) -> Self {
        Self { kept, owner: caller.owner(), caller: caller.clone(), bodies, keep_alive, request: None }
    }

    /// The same for this request.
    pub(super) fn with_request(self, request: ReplayableRequest) -> Self {
        Self { request: Some(Arc::new(request)), ..self }
    }

    /// Whether the request comes from the inbox, which keeps it.
    pub(crate) fn is_replayed(&self) -> bool {
        self.request.is_none()
    }

    /// The same without the request, which is not kept.
    pub(crate) fn without_request(&self) -> Self {
        Self { request: None, ..self.clone() }
    }

    /// What the inbox keeps of the request for the response with this id, of which a client may have got a part; `None`
    /// where it comes from there.
    pub(crate) fn replay(
        &self,
        response: &str,
        created: u64,
        delivered: bool,
    ) -> Option<Box<(InboxRow, InboxBody)>> {
        let ReplayableRequest { id, path, headers, body } = &**self.request.as_ref()?;
        let row = InboxRow {
            id: response.to_owned(),
            state: InboxState::Leased,
            delivered,
            ..InboxRow::new(&self.owner, id, path, created)
        };
        Some(Box::new((row, InboxBody::new(headers, body.clone()))))
    }

    /// A client is about to get a part of a response that runs: its request is not sent again.
    pub(crate) async fn deliver(&self, id: &str) {
        match self.kept.store.deliver_answer(id, None).await {
            Ok(()) | Err(ResponseStoreError::Deleted) => {}
            Err(error) => tracing::warn!(%error, "it is not kept that a client reads a response"),
        }
    }

    /// Whether a response waits to be generated again.
    pub(crate) fn is_waiting(&self, id: &str) -> bool {
        self.kept.inbox.get(&self.owner, id).is_some()
    }

    /// A response does not wait any more to be generated again.
    pub(crate) async fn forget(&self, id: &str) -> Result<(), GatewayError> {
        if let Some(entry) = self.kept.inbox.get(&self.owner, id) {
            let deleted = self.kept.store.delete_request(&self.owner, id).await;
            deleted.map_err(|error| not_stored("that the response is cancelled", &error))?;
            entry.cancel().await;
        }
        Ok(())
    }

    /// A response that runs in the background, once it does where it waits for that.
    pub(crate) async fn running_soon(&self, id: &str) -> Option<Arc<RunningResponse>> {
        if let Some(entry) = self.kept.inbox.get(&self.owner, id) {
            tokio::select! {
                () = self.kept.background.begun(id) => {}
                () = entry.gone() => {}
            }
        }
        self.running(id)
    }

    /// The owner's name in the store.
    pub(crate) fn owner(&self) -> &str {
        &self.owner
    }

    /// Time between keep-alives of a stream.
    pub(crate) fn keep_alive(&self) -> Duration {
        self.keep_alive
    }

    /// Holds so much memory for the caller.
    pub(crate) fn hold(&self, bytes: usize) -> Result<BodyPermit, GatewayError> {
        self.bodies.hold(&self.caller, bytes)
    }

    /// A response.
    pub(crate) async fn body(&self, id: &str) -> Result<Option<StoredBody>, GatewayError> {
        let (owner, id) = (self.owner.clone(), id.to_owned());
        let read = self.kept.store.read(move |store| store.body(&owner, &id)).await;
        read.map_err(|error| unread(&error))
    }

    /// The input of a response.
    pub(crate) async fn input(&self, id: &str) -> Result<Option<Vec<u8>>, GatewayError> {
        let (owner, id) = (self.owner.clone(), id.to_owned());
        let read = self.kept.store.read(move |store| store.input(&owner, &id)).await;
        read.map_err(|error| unread(&error))
    }

    /// The first chunk of a response that has events numbered `from` or later.
    pub(crate) async fn events(&self, id: &str, from: u64) -> Result<Option<EventChunk>, GatewayError> {
        let (owner, id) = (self.owner.clone(), id.to_owned());
        let read = self.kept.store.read(move |store| store.events(&owner, &id, from)).await;
        read.map_err(|error| unread(&error))
    }

    /// A response and those that it continues, the first one first, and the memory that they take. Blocks.
    pub(crate) fn conversation(&self, id: &str) -> Result<(Vec<StoredTurn>, BodyPermit), GatewayError> {
        const FIELD: &str = "previous_response_id";
        let mut permit = self.hold(0)?;
        let mut refusal = None;
        let admit = |bytes| {
            self.bodies.grow(&mut permit, bytes).inspect_err(|error| refusal = Some(error.clone())).is_ok()
        };
        let turns = self.kept.store.conversation(&self.owner, id, CONVERSATION, admit);
        let turns = turns.map_err(|error| match (error, refusal) {
            (_, Some(refusal)) => refusal,
            (ConversationError::Store(error), _) => unread(&error),
            (ConversationError::Missing(missing), _) => {
                let continued = if missing == id {
                    String::new()
                } else {
                    format!(", which response '{id}' continues and which was deleted")
                };
                let message = format!(
                    "Previous response with id '{missing}' not found{continued}; send the whole conversation as the `input`"
                );
                let param = Some(FIELD.to_owned());
                GatewayError { param, ..GatewayError::new(ErrorKind::PreviousResponseNotFound, message) }
            }
            (error, _) => GatewayError::field(
                FIELD,
                format!("the conversation of response '{id}' is too long to be continued: {error}; send what matters of it as the `input`"),
            ),
        })?;
        Ok((turns, permit))
    }

    /// Keeps a response of this owner, durably.
    pub(crate) async fn insert(&self, row: NewRow) -> Result<(), GatewayError> {
        self.kept.store.insert(row).await.map_err(|error| unkept(&error))
    }

    /// A kept response has ended, with this body.
    pub(crate) async fn finish(&self, id: &str, body: bytes::Bytes) -> Result<(), GatewayError> {
        self.kept.store.finish(id, body).await.map_err(|error| unkept(&error))
    }

    /// Deletes a response; false where there is none.
    pub(crate) async fn delete(&self, id: &str) -> Result<bool, GatewayError> {
        self.kept.store.delete(&self.owner, id).await.map_err(|error| unkept(&error))
    }

    /// A response that runs in the background.
    pub(crate) fn running(&self, id: &str) -> Option<Arc<RunningResponse>> {
        self.kept.background.get(&self.owner, id)
    }

    /// Begins a response in the background.
    pub(crate) fn begin(&self, id: &str) -> Result<EventLog, GatewayError> {
        let begun = self.kept.background.begin(self.kept.store.clone(), &self.owner, id);
        begun.map_err(|running| {
            let message = format!(
                "{running} responses of this caller run in the background, which is as many as this gateway takes; wait until one has ended, or cancel one"
            );
            GatewayError::new(ErrorKind::Overloaded, message).retry_after(RETRY_AFTER)
        })
    }
}

/// The error for a response that is not kept.
fn unkept(error: &ResponseStoreError) -> GatewayError {
    let GatewayError { message, kind, .. } = not_stored("the response", error);
    GatewayError::new(kind, format!("{message}, or send `store: false`"))
}

/// The error for what is not kept.
pub(super) fn not_stored(what: &str, error: &ResponseStoreError) -> GatewayError {
    let why = match error {
        ResponseStoreError::DiskFull => "its disk is full; free some space".to_owned(),
        ResponseStoreError::TooLarge { .. } => {
            format!("{error}; raise `--responses-max-size` of the gateway")
        }
        ResponseStoreError::InboxFull { .. } => format!(
            "{error}; wait until some have ended, or raise `--responses-max-size` of the gateway, of which an owner's take a quarter"
        ),
        ResponseStoreError::Deleted => "it was deleted meanwhile; send the request again".to_owned(),
        _ => "its store failed; the gateway's log says why".to_owned(),
    };
    let kind = match error {
        ResponseStoreError::DiskFull
        | ResponseStoreError::TooLarge { .. }
        | ResponseStoreError::InboxFull { .. }
        | ResponseStoreError::RunsFull { .. } => ErrorKind::StoreFull,
        _ => ErrorKind::Internal,
    };
    GatewayError::new(kind, format!("the gateway cannot keep {what}: {why}"))
}

/// The error for what cannot be read.
pub(super) fn unread(error: &ResponseStoreError) -> GatewayError {
    tracing::error!(%error, "the store of responses cannot be read");
    GatewayError::new(ErrorKind::Internal, "the gateway cannot read what it keeps; its log says why")
}
