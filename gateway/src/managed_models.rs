//! Models that a gateway creates and deletes for clients: Models, ModelDeployments and ModelRoutes with the label
//! `russet.dev/managed-by: gateway`, in the namespace of the client's key. `creation` and `removal` decide, here is the IO.
//! An admission policy of the API server holds the gateway to the label, whatever is decided here.

mod creation;
mod objects;
mod removal;
mod source;

use std::fmt::Debug;
use std::sync::Arc;

use kube::api::{ListParams, PostParams};
use kube::core::NamespaceResourceScope;
use kube::{Api, Client, Resource};
use objects::{ManagedObject, NamespaceObjects, Requester, title};
use russet_crds::{Model, ModelDeployment, ModelRoute};
use russet_rpc::list_item::ListItem;
use serde::Serialize;
use serde::de::DeserializeOwned;
use source::PullSource;
pub use source::{CatalogModel, FindCatalogModel};
use tokio::sync::{Mutex, Semaphore};

use crate::api_timeout::{WriteError, delete_exactly, with_timeout};
use crate::error::{ErrorKind, GatewayError, RETRY_AFTER, shown};
use crate::keys::ApiKey;

/// Changes that run or wait in one gateway; each may take a minute where the API server is slow.
const MAX_PENDING_CHANGES: usize = 32;
/// How often a change is decided anew because another writer was faster.
const MAX_ROUNDS: usize = 3;
/// Longest part of the API server's words in an error.
const MAX_REASON_CHARS: usize = 400;

/// Creates and deletes models for clients.
pub(crate) struct ManagedModels {
    client: Client,
    find: FindCatalogModel,
    pending: Arc<Semaphore>,
    /// One change at a time, so that the limits hold.
    changing: Mutex<()>,
}

/// One write of a change.
#[derive(Clone, Debug, PartialEq)]
enum ModelStep {
    /// Creates the object.
    Create(ManagedObject),
    /// Deletes the object that was read.
    Delete(ManagedObject),
}

/// Why a write was not done.
enum StepError {
    /// Another writer was faster: decide anew.
    Conflict,
    /// It cannot be done.
    Failed(GatewayError),
}

impl ManagedModels {
    /// Changes objects as this client, and looks up names there.
    pub(crate) fn new(client: Client, find: FindCatalogModel) -> Self {
        let pending = Arc::new(Semaphore::new(MAX_PENDING_CHANGES));
        Self { client, find, pending, changing: Mutex::new(()) }
    }

    /// Makes a name that of a model of the catalogue or the hub, in the namespace of this key. Says what was created.
    pub(crate) async fn pull(
        self: &Arc<Self>,
        key: &ApiKey,
        name: &str,
    ) -> Result<Vec<String>, GatewayError> {
        let source = PullSource::parse(name, &self.find)?;
        let requester = Requester::new(key, name);
        self.change(&key.namespace, move |objects| creation::pull(objects, &requester, &source)).await
    }

    /// Gives deployments of the namespace of this key a further name. Says what was created.
    pub(crate) async fn copy(
        self: &Arc<Self>,
        key: &ApiKey,
        targets: Vec<String>,
        name: &str,
    ) -> Result<Vec<String>, GatewayError> {
        let requester = Requester::new(key, name);
        self.change(&key.namespace, move |objects| creation::copy(objects, &requester, &targets)).await
    }

    /// Deletes a name of the namespace of this key, and what it was pulled for. Says what was deleted.
    pub(crate) async fn delete(
        self: &Arc<Self>,
        key: &ApiKey,
        name: &str,
    ) -> Result<Vec<String>, GatewayError> {
        let (namespace, name) = (key.namespace.clone(), name.to_owned());
        self.change(&key.namespace, move |objects| removal::removal(objects, &namespace, &name)).await
    }

    /// Decides by what is there, and does it, to the end even if the client leaves.
    async fn change(
        self: &Arc<Self>,
        namespace: &str,
        decide: impl Fn(&NamespaceObjects) -> Result<Vec<ModelStep>, GatewayError> + Send + 'static,
    ) -> Result<Vec<String>, GatewayError> {
        let Ok(permit) = self.pending.clone().try_acquire_owned() else {
            let message = format!(
                "{MAX_PENDING_CHANGES} changes of models run or wait here already, which is the most; try again later"
            );
            return Err(GatewayError::new(ErrorKind::Overloaded, message).retry_after(RETRY_AFTER));
        };
        let (models, namespace) = (self.clone(), namespace.to_owned());
        let work = tokio::spawn(async move {
            let _permit = permit;
            let _turn = models.changing.lock().await;
            models.run(&namespace, decide).await
        });
        work.await.unwrap_or_else(|_| {
            Err(GatewayError::new(ErrorKind::Internal, "the gateway could not change the model; see its log"))
        })
    }

    async fn run(
        &self,
        namespace: &str,
        decide: impl Fn(&NamespaceObjects) -> Result<Vec<ModelStep>, GatewayError>,
    ) -> Result<Vec<String>, GatewayError> {
        let mut done: Vec<ModelStep> = Vec::new();
        for _ in 0..MAX_ROUNDS {
            let steps = match self.objects(namespace).await.and_then(|objects| decide(&objects)) {
                Ok(steps) => steps,
                Err(error) => return Err(self.undone(done, error).await),
            };
            match self.apply(steps, &mut done).await {
                Ok(()) => return Ok(done.iter().map(ModelStep::title).collect()),
                Err(StepError::Conflict) => {}
                Err(StepError::Failed(error)) => return Err(self.undone(done, error).await),
            }
        }
        let message =
            format!("others change the models of namespace {namespace} at the same time; try again");
        let error = GatewayError::new(ErrorKind::ModelNotReady, message).retry_after(RETRY_AFTER);
        Err(self.undone(done, error).await)
    }

    async fn apply(&self, steps: Vec<ModelStep>, done: &mut Vec<ModelStep>) -> Result<(), StepError> {
        for step in steps {
            done.push(self.write(step).await?);
        }
        Ok(())
    }

    /// The error, after what was created for the change that failed is deleted again: half of a model is of no use, and has
    /// no name.
    async fn undone(&self, done: Vec<ModelStep>, error: GatewayError) -> GatewayError {
        for step in done.into_iter().rev() {
            let ModelStep::Create(object) = step else { continue };
            let title = object.title();
            if self.write(ModelStep::Delete(object)).await.is_err() {
                tracing::warn!(object = title, "cannot delete what was created for a pull that failed");
            }
        }
        error
    }

    /// What a namespace has now.
    async fn objects(&self, namespace: &str) -> Result<NamespaceObjects, GatewayError> {
        let mut undecodable = Vec::new();
        Ok(NamespaceObjects {
            models: self.list::<Model>(namespace, &mut undecodable).await?,
            deployments: self.list::<ModelDeployment>(namespace, &mut undecodable).await?,
            routes: self.list::<ModelRoute>(namespace, &mut undecodable).await?,
            undecodable,
        })
    }

    async fn list<K>(&self, namespace: &str, undecodable: &mut Vec<String>) -> Result<Vec<K>, GatewayError>
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope>,
        K: Clone + Debug + DeserializeOwned,
    {
        let api: Api<ListItem<K>> = Api::namespaced(self.client.clone(), namespace);
        let listed = with_timeout(api.list(&ListParams::default())).await;
        let what = format!("the {} of namespace {namespace}", K::plural(&()));
        let listed = listed.map_err(|error| failure(&what, "listed", error))?;
        let mut objects = Vec::new();
        for ListItem(item) in listed.items {
            match item {
                Ok(object) => objects.push(object),
                Err(error) => undecodable.push(title(&K::kind(&()), &error.metadata)),
            }
        }
        Ok(objects)
    }

    /// Writes, and says with what the server made of an object.
    async fn write(&self, step: ModelStep) -> Result<ModelStep, StepError> {
        match step {
            ModelStep::Create(ManagedObject::Model(object)) => {
                Ok(ModelStep::Create(ManagedObject::Model(Box::new(self.create(*object).await?))))
            }
            ModelStep::Create(ManagedObject::Deployment(object)) => {
                Ok(ModelStep::Create(ManagedObject::Deployment(Box::new(self.create(*object).await?))))
            }
            ModelStep::Create(ManagedObject::Route(object)) => {
                Ok(ModelStep::Create(ManagedObject::Route(Box::new(self.create(*object).await?))))
            }
            ModelStep::Delete(object) => {
                match &object {
                    ManagedObject::Model(one) => self.delete_object::<Model>(one.meta()).await?,
                    ManagedObject::Deployment(one) => {
                        self.delete_object::<ModelDeployment>(one.meta()).await?;
                    }
                    ManagedObject::Route(one) => self.delete_object::<ModelRoute>(one.meta()).await?,
                }
                Ok(ModelStep::Delete(object))
            }
        }
    }

    async fn create<K>(&self, object: K) -> Result<K, StepError>
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope>,
        K: Clone + Debug + Serialize + DeserializeOwned,
    {
        let title = title(&K::kind(&()), object.meta());
        let namespace = object.meta().namespace.clone().unwrap_or_default();
        let api: Api<K> = Api::namespaced(self.client.clone(), &namespace);
        let params = PostParams {
            field_manager: Some(russet_crds::names::GATEWAY_MANAGER.to_owned()),
            ..PostParams::default()
        };
        match with_timeout(api.create(&params, &object)).await {
            Ok(created) => Ok(created),
            Err(error) if error.code() == Some(409) => Err(StepError::Conflict),
            Err(error) => Err(StepError::Failed(failure(&title, "created", error))),
        }
    }

    async fn delete_object<K>(&self, metadata: &kube::core::ObjectMeta) -> Result<(), StepError>
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope>,
        K: Clone + Debug + DeserializeOwned,
    {
        let namespace = metadata.namespace.as_deref().unwrap_or_default();
        let api: Api<K> = Api::namespaced(self.client.clone(), namespace);
        // What has the name by now may be another one, or no longer a gateway's.
        match delete_exactly(&api, metadata).await {
            Ok(()) => Ok(()),
            Err(error) if error.code() == Some(409) => Err(StepError::Conflict),
            Err(error) => Err(StepError::Failed(failure(&title(&K::kind(&()), metadata), "deleted", error))),
        }
    }
}

impl Requester {
    fn new(key: &ApiKey, name: &str) -> Self {
        Self { namespace: key.namespace.clone(), key: key.full_name().to_owned(), name: name.to_owned() }
    }
}

impl ModelStep {
    /// What it does, as past.
    fn title(&self) -> String {
        match self {
            Self::Create(object) => format!("created {}", object.title()),
            Self::Delete(object) => format!("deleted {}", object.title()),
        }
    }
}

/// The error of a request to the API server.
fn failure(object: &str, verb: &str, error: WriteError) -> GatewayError {
    let code = error.code();
    let WriteError { cause, timed_out: _, status } = error;
    tracing::warn!(object, "it could not be {verb} for a client: {cause}");
    let reason: String =
        status.map(|status| status.message).unwrap_or_default().chars().take(MAX_REASON_CHARS).collect();
    match code {
        Some(403) => {
            let message = format!(
                "{object} could not be {verb}: {reason}; the gateway has that right where `russet up --model-management`, or \
                 the chart's gateway.modelManagement, gives it"
            );
            GatewayError::new(ErrorKind::Forbidden, message)
        }
        Some(400 | 422) => GatewayError::field("model", format!("{object} could not be {verb}: {reason}")),
        _ => {
            let message = format!("{object} could not be {verb}: the API server does not answer; try again");
            GatewayError::new(ErrorKind::ModelNotReady, message).retry_after(RETRY_AFTER)
        }
    }
}

/// The error for a caller that may not change models, about this name.
pub(crate) fn denied(verb: &str, name: &str, has_key: bool) -> GatewayError {
    let who = if has_key { "this key" } else { "a caller without a key" };
    let message = format!(
        "{who} may not {verb} the model `{}`: an AccessKey with `modelManagement: Allowed` may (`russet key create NAME \
         --model-management`)",
        shown(name)
    );
    GatewayError::new(ErrorKind::Forbidden, message)
}
