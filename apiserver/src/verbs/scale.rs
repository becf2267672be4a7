//! `/scale`: a custom resource's replicas in the format of autoscalers and `kubectl scale`.

use std::sync::Arc;

use http::{Response, StatusCode, header};
use serde_json::{Value, json};

use super::write::{self, WriteOrigin};
use crate::call::Call;
use crate::kinds::resource::Scale;
use crate::object;
use crate::output::{self, Body};
use crate::patch::{json as json_patch, merge};
use crate::schema::strict;
use crate::state::ServerState;
use crate::status::{ApiError, Result};

/// Handles a get, update or patch of `/scale`.
pub async fn handle(api: &Arc<ServerState>, verb: &str, call: &Call) -> Result<Response<Body>> {
    let scale = call
        .resource
        .custom
        .as_ref()
        .and_then(|custom| custom.scale.as_ref())
        .ok_or_else(ApiError::no_such_path)?;
    match verb {
        "get" => {
            let record = api.store.get(&call.key()).ok_or_else(|| call.not_found())?;
            Ok(output::value(StatusCode::OK, &show(scale, &call.resource.view(&record))))
        }
        "update" => {
            let (body, _) = write::decode(call)?;
            write_back(api, call, scale, |_| Ok(body.clone())).await
        }
        "patch" => {
            let media = call.header(header::CONTENT_TYPE).split(';').next().unwrap_or_default().trim();
            let (body, _) =
                strict::yaml(&call.body).map_err(|error| ApiError::bad_request(error.to_string()))?;
            let is_json_patch = media == "application/json-patch+json";
            if !is_json_patch {
                write::check_merge_patch(&body)?;
            }
            write_back(api, call, scale, |shown| {
                if is_json_patch {
                    json_patch::json_patch(shown, &body)
                        .map_err(|error| ApiError::bad_request(error.to_string()))
                } else {
                    Ok(merge::merge_patch(shown, &body))
                }
            })
            .await
        }
        _ => Err(ApiError::method_not_allowed()),
    }
}

async fn write_back(
    api: &Arc<ServerState>,
    call: &Call,
    scale: &Scale,
    make: impl Fn(&Value) -> Result<Value>,
) -> Result<Response<Body>> {
    // The write replaces the whole object with a single field of its spec changed.
    let mut whole = call.clone();
    whole.subresource = String::new();
    let updated = write::modify(api, &whole, WriteOrigin::Write, |current| {
        let desired = make(&show(scale, current))?;
        write::check_maps(&desired, "Scale")?;
        let Some(replicas) = desired["spec"]["replicas"].as_i64().filter(|replicas| *replicas >= 0) else {
            return Err(ApiError::invalid_field(
                "autoscaling",
                "Scale",
                &call.name,
                "spec.replicas",
                format!(
                    "Invalid value: {}: must be a whole number of at least 0",
                    desired["spec"]["replicas"]
                ),
            ));
        };
        let mut new = current.clone();
        set(&mut new, &scale.spec_replicas, json!(replicas));
        let asked = object::resource_version(&desired);
        object::set_meta(
            &mut new,
            "resourceVersion",
            if asked.is_empty() { Value::Null } else { json!(asked) },
        );
        Ok((new, Vec::new()))
    });
    let (updated, _) = updated.await?;
    Ok(output::value(StatusCode::OK, &show(scale, &updated)))
}

/// The object as a Scale.
fn show(scale: &Scale, object: &Value) -> Value {
    let mut metadata = json!({});
    for field in ["name", "namespace", "uid", "resourceVersion", "creationTimestamp"] {
        if let Some(value) = object["metadata"].get(field) {
            metadata[field] = value.clone();
        }
    }
    let mut shown = json!({
        "kind": "Scale", "apiVersion": "autoscaling/v1", "metadata": metadata,
        "spec": {"replicas": at(object, &scale.spec_replicas).as_i64().unwrap_or(0)},
        "status": {"replicas": at(object, &scale.status_replicas).as_i64().unwrap_or(0)},
    });
    if let Some(selector) = scale.selector.as_ref().and_then(|path| at(object, path).as_str()) {
        shown["status"]["selector"] = json!(selector);
    }
    shown
}

fn at<'a>(object: &'a Value, path: &str) -> &'a Value {
    path.trim_start_matches('.').split('.').fold(object, |value, part| &value[part])
}

fn set(object: &mut Value, path: &str, value: Value) {
    let mut place = object;
    for part in path.trim_start_matches('.').split('.') {
        if !place.is_object() {
            *place = json!({});
        }
        place = &mut place[part];
    }
    *place = value;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_scale_shows_and_sets_the_paths_of_its_definition() {
        let scale = Scale {
            spec_replicas: ".spec.replicas".into(),
            status_replicas: ".status.ready.replicas".into(),
            selector: Some(".status.selector".into()),
        };
        let mut object =
            json!({"metadata": {"name": "x"}, "status": {"ready": {"replicas": 2}, "selector": "a=b"}});
        set(&mut object, &scale.spec_replicas, json!(3));
        let shown = show(&scale, &object);
        assert_eq!(shown["spec"]["replicas"], 3);
        assert_eq!(shown["status"], json!({"replicas": 2, "selector": "a=b"}));
    }
}
