//! The protobuf messages of admission policies, which Go programs send typed.
//!
//! The numbers are from the `generated.proto` of k8s.io/api (v0.36). Not here: decoding.

use super::field::MessageField;
use super::field::Type::*;

/// The messages, by name.
#[rustfmt::skip]
pub const MESSAGES: &[(&str, &[MessageField])] = &[
    ("AuditAnnotation", &[(1, "key", Text), (2, "valueExpression", Text)]),
    ("Condition", &[
        (1, "type", Text), (2, "status", Text), (3, "observedGeneration", Int), (4, "lastTransitionTime", Time),
        (5, "reason", Text), (6, "message", Text),
    ]),
    ("ExpressionWarning", &[(2, "fieldRef", Text), (3, "warning", Text)]),
    ("MatchCondition", &[(1, "name", Text), (2, "expression", Text)]),
    ("MatchResources", &[
        (1, "namespaceSelector", Message("LabelSelector")), (2, "objectSelector", Message("LabelSelector")),
        (3, "resourceRules", Messages("NamedRuleWithOperations")),
        (4, "excludeResourceRules", Messages("NamedRuleWithOperations")), (7, "matchPolicy", MaybeText),
    ]),
    ("NamedRuleWithOperations", &[(1, "resourceNames", Texts), (2, "", Inline("RuleWithOperations"))]),
    ("ParamKind", &[(1, "apiVersion", Text), (2, "kind", Text)]),
    ("ParamRef", &[
        (1, "name", Text), (2, "namespace", Text), (3, "selector", Present("LabelSelector")),
        (4, "parameterNotFoundAction", MaybeText),
    ]),
    ("Rule", &[(1, "apiGroups", Texts), (2, "apiVersions", Texts), (3, "resources", Texts), (4, "scope", MaybeText)]),
    ("RuleWithOperations", &[(1, "operations", Texts), (2, "", Inline("Rule"))]),
    ("TypeChecking", &[(1, "expressionWarnings", Messages("ExpressionWarning"))]),
    ("ValidatingAdmissionPolicy", &[
        (1, "metadata", Message("ObjectMeta")), (2, "spec", Message("ValidatingAdmissionPolicySpec")),
        (3, "status", Message("ValidatingAdmissionPolicyStatus")),
    ]),
    ("ValidatingAdmissionPolicyBinding", &[
        (1, "metadata", Message("ObjectMeta")), (2, "spec", Message("ValidatingAdmissionPolicyBindingSpec")),
    ]),
    ("ValidatingAdmissionPolicyBindingSpec", &[
        (1, "policyName", Text), (2, "paramRef", Present("ParamRef")),
        (3, "matchResources", Present("MatchResources")), (4, "validationActions", Texts),
    ]),
    ("ValidatingAdmissionPolicySpec", &[
        (1, "paramKind", Present("ParamKind")), (2, "matchConstraints", Present("MatchResources")),
        (3, "validations", Messages("Validation")), (4, "failurePolicy", MaybeText),
        (5, "auditAnnotations", Messages("AuditAnnotation")), (6, "matchConditions", Messages("MatchCondition")),
        (7, "variables", Messages("Variable")),
    ]),
    ("ValidatingAdmissionPolicyStatus", &[
        (1, "observedGeneration", Int), (2, "typeChecking", Present("TypeChecking")),
        (3, "conditions", Messages("Condition")),
    ]),
    ("Validation", &[
        (1, "expression", Text), (2, "message", Text), (3, "reason", MaybeText), (4, "messageExpression", Text),
    ]),
    ("Variable", &[(1, "name", Text), (2, "expression", Text)]),
];
