//! The protobuf messages of the kinds that clients send typed: field numbers, JSON names, types.
//!
//! The numbers are from Kubernetes' published `generated.proto` files (k8s.io/api and k8s.io/apimachinery,
//! v0.36). Not here: decoding.

use super::field::MessageField;
use super::field::Type::*;
use super::{admission, definitions};

/// apiVersion (empty for any), kind, message.
const KINDS: &[(&str, &str, &str)] = &[
    ("v1", "ConfigMap", "ConfigMap"),
    ("v1", "Event", "Event"),
    ("v1", "Namespace", "Namespace"),
    ("v1", "Secret", "Secret"),
    ("v1", "ServiceAccount", "ServiceAccount"),
    ("admissionregistration.k8s.io/v1", "ValidatingAdmissionPolicy", "ValidatingAdmissionPolicy"),
    (
        "admissionregistration.k8s.io/v1",
        "ValidatingAdmissionPolicyBinding",
        "ValidatingAdmissionPolicyBinding",
    ),
    ("apiextensions.k8s.io/v1", "CustomResourceDefinition", "CustomResourceDefinition"),
    ("authentication.k8s.io/v1", "SelfSubjectReview", "SelfSubjectReview"),
    ("authentication.k8s.io/v1", "TokenRequest", "TokenRequest"),
    ("authentication.k8s.io/v1", "TokenReview", "TokenReview"),
    ("authorization.k8s.io/v1", "LocalSubjectAccessReview", "LocalSubjectAccessReview"),
    ("authorization.k8s.io/v1", "SelfSubjectAccessReview", "SelfSubjectAccessReview"),
    ("authorization.k8s.io/v1", "SelfSubjectRulesReview", "SelfSubjectRulesReview"),
    ("authorization.k8s.io/v1", "SubjectAccessReview", "SubjectAccessReview"),
    ("certificates.k8s.io/v1", "CertificateSigningRequest", "CertificateSigningRequest"),
    ("coordination.k8s.io/v1", "Lease", "Lease"),
    ("events.k8s.io/v1", "Event", "events.Event"),
    ("rbac.authorization.k8s.io/v1", "ClusterRole", "ClusterRole"),
    ("rbac.authorization.k8s.io/v1", "ClusterRoleBinding", "ClusterRoleBinding"),
    ("rbac.authorization.k8s.io/v1", "Role", "Role"),
    ("rbac.authorization.k8s.io/v1", "RoleBinding", "RoleBinding"),
    // Every API group registers it under its own version.
    ("", "DeleteOptions", "DeleteOptions"),
];

/// The message of a kind.
pub fn of_kind(api_version: &str, kind: &str) -> Option<&'static str> {
    KINDS
        .iter()
        .find(|(version, name, _)| *name == kind && (version.is_empty() || *version == api_version))
        .map(|(_, _, message)| *message)
}

/// The fields of a message; none for an unknown message.
pub fn fields(message: &str) -> &'static [MessageField] {
    let mut known = MESSAGES.iter().chain(definitions::MESSAGES).chain(admission::MESSAGES);
    known.find(|(name, _)| *name == message).map_or(&[], |(_, fields)| *fields)
}

#[rustfmt::skip]
const MESSAGES: &[(&str, &[MessageField])] = &[
    ("AggregationRule", &[(1, "clusterRoleSelectors", Messages("LabelSelector"))]),
    ("BoundObjectReference", &[
        (1, "kind", Text), (2, "apiVersion", Text), (3, "name", Text), (4, "uid", Text),
    ]),
    ("CertificateSigningRequest", &[
        (1, "metadata", Message("ObjectMeta")), (2, "spec", Message("CertificateSigningRequestSpec")),
        (3, "status", Message("CertificateSigningRequestStatus")),
    ]),
    ("CertificateSigningRequestCondition", &[
        (1, "type", Text), (2, "reason", Text), (3, "message", Text), (4, "lastUpdateTime", Time),
        (5, "lastTransitionTime", Time), (6, "status", Text),
    ]),
    ("CertificateSigningRequestSpec", &[
        (1, "request", Bytes), (2, "username", Text), (3, "uid", Text), (4, "groups", Texts),
        (5, "usages", Texts), (6, "extra", TextsMap), (7, "signerName", Text),
        (8, "expirationSeconds", MaybeInt),
    ]),
    ("CertificateSigningRequestStatus", &[
        (1, "conditions", Messages("CertificateSigningRequestCondition")), (2, "certificate", Bytes),
    ]),
    ("ClusterRole", &[
        (1, "metadata", Message("ObjectMeta")), (2, "rules", Messages("PolicyRule")),
        (3, "aggregationRule", Message("AggregationRule")),
    ]),
    ("ClusterRoleBinding", &[
        (1, "metadata", Message("ObjectMeta")), (2, "subjects", Messages("Subject")),
        (3, "roleRef", Message("RoleRef")),
    ]),
    ("ConfigMap", &[
        (1, "metadata", Message("ObjectMeta")), (2, "data", TextMap), (3, "binaryData", BytesMap),
        (4, "immutable", MaybeBool),
    ]),
    ("DeleteOptions", &[
        (1, "gracePeriodSeconds", MaybeInt), (2, "preconditions", Message("Preconditions")),
        (3, "orphanDependents", MaybeBool), (4, "propagationPolicy", MaybeText), (5, "dryRun", Texts),
        (6, "ignoreStoreReadErrorWithClusterBreakingPotential", MaybeBool),
    ]),
    ("Event", &[
        (1, "metadata", Message("ObjectMeta")), (2, "involvedObject", Message("ObjectReference")),
        (3, "reason", Text), (4, "message", Text), (5, "source", Message("EventSource")),
        (6, "firstTimestamp", Time), (7, "lastTimestamp", Time), (8, "count", Int), (9, "type", Text),
        (10, "eventTime", MicroTime), (11, "series", Message("EventSeries")), (12, "action", Text),
        (13, "related", Message("ObjectReference")), (14, "reportingComponent", Text),
        (15, "reportingInstance", Text),
    ]),
    ("EventSeries", &[(1, "count", Int), (2, "lastObservedTime", MicroTime)]),
    ("EventSource", &[(1, "component", Text), (2, "host", Text)]),
    ("FieldSelectorAttributes", &[
        (1, "rawSelector", Text), (2, "requirements", Messages("FieldSelectorRequirement")),
    ]),
    ("FieldSelectorRequirement", &[(1, "key", Text), (2, "operator", Text), (3, "values", Texts)]),
    ("LabelSelector", &[
        (1, "matchLabels", TextMap), (2, "matchExpressions", Messages("LabelSelectorRequirement")),
    ]),
    ("LabelSelectorAttributes", &[
        (1, "rawSelector", Text), (2, "requirements", Messages("LabelSelectorRequirement")),
    ]),
    ("LabelSelectorRequirement", &[(1, "key", Text), (2, "operator", Text), (3, "values", Texts)]),
    ("Lease", &[(1, "metadata", Message("ObjectMeta")), (2, "spec", Message("LeaseSpec"))]),
    ("LeaseSpec", &[
        (1, "holderIdentity", MaybeText), (2, "leaseDurationSeconds", MaybeInt),
        (3, "acquireTime", MicroTime), (4, "renewTime", MicroTime), (5, "leaseTransitions", MaybeInt),
        (6, "strategy", MaybeText), (7, "preferredHolder", MaybeText),
    ]),
    ("LocalObjectReference", &[(1, "name", Text)]),
    ("LocalSubjectAccessReview", &[
        (1, "metadata", Message("ObjectMeta")), (2, "spec", Message("SubjectAccessReviewSpec")),
        (3, "status", Message("SubjectAccessReviewStatus")),
    ]),
    ("ManagedFieldsEntry", &[
        (1, "manager", Text), (2, "operation", Text), (3, "apiVersion", Text), (4, "time", Time),
        (6, "fieldsType", Text), (7, "fieldsV1", Json), (8, "subresource", Text),
    ]),
    ("Namespace", &[
        (1, "metadata", Message("ObjectMeta")), (2, "spec", Message("NamespaceSpec")),
        (3, "status", Message("NamespaceStatus")),
    ]),
    ("NamespaceCondition", &[
        (1, "type", Text), (2, "status", Text), (4, "lastTransitionTime", Time), (5, "reason", Text),
        (6, "message", Text),
    ]),
    ("NamespaceSpec", &[(1, "finalizers", Texts)]),
    ("NamespaceStatus", &[(1, "phase", Text), (2, "conditions", Messages("NamespaceCondition"))]),
    ("NonResourceAttributes", &[(1, "path", Text), (2, "verb", Text)]),
    ("NonResourceRule", &[(1, "verbs", Texts), (2, "nonResourceURLs", Texts)]),
    ("ObjectMeta", &[
        (1, "name", Text), (2, "generateName", Text), (3, "namespace", Text), (4, "selfLink", Text),
        (5, "uid", Text), (6, "resourceVersion", Text), (7, "generation", Int),
        (8, "creationTimestamp", Time), (9, "deletionTimestamp", Time),
        (10, "deletionGracePeriodSeconds", MaybeInt), (11, "labels", TextMap), (12, "annotations", TextMap),
        (13, "ownerReferences", Messages("OwnerReference")), (14, "finalizers", Texts),
        (17, "managedFields", Messages("ManagedFieldsEntry")),
    ]),
    ("ObjectReference", &[
        (1, "kind", Text), (2, "namespace", Text), (3, "name", Text), (4, "uid", Text),
        (5, "apiVersion", Text), (6, "resourceVersion", Text), (7, "fieldPath", Text),
    ]),
    ("OwnerReference", &[
        (1, "kind", Text), (3, "name", Text), (4, "uid", Text), (5, "apiVersion", Text),
        (6, "controller", MaybeBool), (7, "blockOwnerDeletion", MaybeBool),
    ]),
    ("PolicyRule", &[
        (1, "verbs", Texts), (2, "apiGroups", Texts), (3, "resources", Texts), (4, "resourceNames", Texts),
        (5, "nonResourceURLs", Texts),
    ]),
    ("Preconditions", &[(1, "uid", MaybeText), (2, "resourceVersion", MaybeText)]),
    ("ResourceAttributes", &[
        (1, "namespace", Text), (2, "verb", Text), (3, "group", Text), (4, "version", Text),
        (5, "resource", Text), (6, "subresource", Text), (7, "name", Text),
        (8, "fieldSelector", Message("FieldSelectorAttributes")),
        (9, "labelSelector", Message("LabelSelectorAttributes")),
    ]),
    ("ResourceRule", &[
        (1, "verbs", Texts), (2, "apiGroups", Texts), (3, "resources", Texts), (4, "resourceNames", Texts),
    ]),
    ("Role", &[(1, "metadata", Message("ObjectMeta")), (2, "rules", Messages("PolicyRule"))]),
    ("RoleBinding", &[
        (1, "metadata", Message("ObjectMeta")), (2, "subjects", Messages("Subject")),
        (3, "roleRef", Message("RoleRef")),
    ]),
    ("RoleRef", &[(1, "apiGroup", Text), (2, "kind", Text), (3, "name", Text)]),
    ("Secret", &[
        (1, "metadata", Message("ObjectMeta")), (2, "data", BytesMap), (3, "type", Text),
        (4, "stringData", TextMap), (5, "immutable", MaybeBool),
    ]),
    ("SelfSubjectAccessReview", &[
        (1, "metadata", Message("ObjectMeta")), (2, "spec", Message("SelfSubjectAccessReviewSpec")),
        (3, "status", Message("SubjectAccessReviewStatus")),
    ]),
    ("SelfSubjectAccessReviewSpec", &[
        (1, "resourceAttributes", Message("ResourceAttributes")),
        (2, "nonResourceAttributes", Message("NonResourceAttributes")),
    ]),
    ("SelfSubjectReview", &[
        (1, "metadata", Message("ObjectMeta")), (2, "status", Message("SelfSubjectReviewStatus")),
    ]),
    ("SelfSubjectReviewStatus", &[(1, "userInfo", Message("UserInfo"))]),
    ("SelfSubjectRulesReview", &[
        (1, "metadata", Message("ObjectMeta")), (2, "spec", Message("SelfSubjectRulesReviewSpec")),
        (3, "status", Message("SubjectRulesReviewStatus")),
    ]),
    ("SelfSubjectRulesReviewSpec", &[(1, "namespace", Text)]),
    ("ServiceAccount", &[
        (1, "metadata", Message("ObjectMeta")), (2, "secrets", Messages("ObjectReference")),
        (3, "imagePullSecrets", Messages("LocalObjectReference")),
        (4, "automountServiceAccountToken", MaybeBool),
    ]),
    ("Subject", &[(1, "kind", Text), (2, "apiGroup", Text), (3, "name", Text), (4, "namespace", Text)]),
    ("SubjectAccessReview", &[
        (1, "metadata", Message("ObjectMeta")), (2, "spec", Message("SubjectAccessReviewSpec")),
        (3, "status", Message("SubjectAccessReviewStatus")),
    ]),
    ("SubjectAccessReviewSpec", &[
        (1, "resourceAttributes", Message("ResourceAttributes")),
        (2, "nonResourceAttributes", Message("NonResourceAttributes")), (3, "user", Text),
        (4, "groups", Texts), (5, "extra", TextsMap), (6, "uid", Text),
    ]),
    ("SubjectAccessReviewStatus", &[
        (1, "allowed", Bool), (2, "reason", Text), (3, "evaluationError", Text), (4, "denied", Bool),
    ]),
    ("SubjectRulesReviewStatus", &[
        (1, "resourceRules", Messages("ResourceRule")),
        (2, "nonResourceRules", Messages("NonResourceRule")), (3, "incomplete", Bool),
        (4, "evaluationError", Text),
    ]),
    ("TokenRequest", &[
        (1, "metadata", Message("ObjectMeta")), (2, "spec", Message("TokenRequestSpec")),
        (3, "status", Message("TokenRequestStatus")),
    ]),
    ("TokenRequestSpec", &[
        (1, "audiences", Texts), (3, "boundObjectRef", Message("BoundObjectReference")),
        (4, "expirationSeconds", MaybeInt),
    ]),
    ("TokenRequestStatus", &[(1, "token", Text), (2, "expirationTimestamp", Time)]),
    ("TokenReview", &[
        (1, "metadata", Message("ObjectMeta")), (2, "spec", Message("TokenReviewSpec")),
        (3, "status", Message("TokenReviewStatus")),
    ]),
    ("TokenReviewSpec", &[(1, "token", Text), (2, "audiences", Texts)]),
    ("TokenReviewStatus", &[
        (1, "authenticated", Bool), (2, "user", Message("UserInfo")), (3, "error", Text),
        (4, "audiences", Texts),
    ]),
    ("UserInfo", &[(1, "username", Text), (2, "uid", Text), (3, "groups", Texts), (4, "extra", TextsMap)]),
    ("events.Event", &[
        (1, "metadata", Message("ObjectMeta")), (2, "eventTime", MicroTime),
        (3, "series", Message("events.EventSeries")), (4, "reportingController", Text),
        (5, "reportingInstance", Text), (6, "action", Text), (7, "reason", Text),
        (8, "regarding", Message("ObjectReference")), (9, "related", Message("ObjectReference")),
        (10, "note", Text), (11, "type", Text), (12, "deprecatedSource", Message("EventSource")),
        (13, "deprecatedFirstTimestamp", Time), (14, "deprecatedLastTimestamp", Time),
        (15, "deprecatedCount", Int),
    ]),
    ("events.EventSeries", &[(1, "count", Int), (2, "lastObservedTime", MicroTime)]),
];

#[cfg(test)]
mod tests {
    use super::super::field::Type;
    use super::{KINDS, MESSAGES, fields};

    #[test]
    fn every_message_that_is_named_is_there() {
        let named = MESSAGES.iter().flat_map(|(_, fields)| *fields).filter_map(|(_, _, kind)| match kind {
            Type::Message(name) | Type::Messages(name) => Some(*name),
            _ => None,
        });
        for name in named.chain(KINDS.iter().map(|(_, _, name)| *name)) {
            assert!(!fields(name).is_empty(), "{name} has no fields");
        }
    }
}
