//! The protobuf messages of custom resource definitions, which Go programs that install their own kinds send
//! typed.
//!
//! The numbers are from the `generated.proto` of k8s.io/apiextensions-apiserver (v0.36). Not here: decoding.

use super::field::MessageField;
use super::field::Type::*;

/// The messages, by name.
#[rustfmt::skip]
pub const MESSAGES: &[(&str, &[MessageField])] = &[
    ("CustomResourceColumnDefinition", &[
        (1, "name", Text), (2, "type", Text), (3, "format", Text), (4, "description", Text),
        (5, "priority", Int), (6, "jsonPath", Text),
    ]),
    ("CustomResourceConversion", &[(1, "strategy", Text), (2, "webhook", Message("WebhookConversion"))]),
    ("CustomResourceDefinition", &[
        (1, "metadata", Message("ObjectMeta")), (2, "spec", Message("CustomResourceDefinitionSpec")),
        (3, "status", Message("CustomResourceDefinitionStatus")),
    ]),
    ("CustomResourceDefinitionCondition", &[
        (1, "type", Text), (2, "status", Text), (3, "lastTransitionTime", Time), (4, "reason", Text),
        (5, "message", Text), (6, "observedGeneration", Int),
    ]),
    ("CustomResourceDefinitionNames", &[
        (1, "plural", Text), (2, "singular", Text), (3, "shortNames", Texts), (4, "kind", Text),
        (5, "listKind", Text), (6, "categories", Texts),
    ]),
    ("CustomResourceDefinitionSpec", &[
        (1, "group", Text), (3, "names", Message("CustomResourceDefinitionNames")), (4, "scope", Text),
        (7, "versions", Messages("CustomResourceDefinitionVersion")),
        (9, "conversion", Message("CustomResourceConversion")), (10, "preserveUnknownFields", Bool),
    ]),
    ("CustomResourceDefinitionStatus", &[
        (1, "conditions", Messages("CustomResourceDefinitionCondition")),
        (2, "acceptedNames", Message("CustomResourceDefinitionNames")), (3, "storedVersions", Texts),
        (4, "observedGeneration", Int),
    ]),
    ("CustomResourceDefinitionVersion", &[
        (1, "name", Text), (2, "served", MaybeBool), (3, "storage", MaybeBool),
        (4, "schema", Message("CustomResourceValidation")),
        (5, "subresources", Message("CustomResourceSubresources")),
        (6, "additionalPrinterColumns", Messages("CustomResourceColumnDefinition")), (7, "deprecated", Bool),
        (8, "deprecationWarning", MaybeText), (9, "selectableFields", Messages("SelectableField")),
    ]),
    ("CustomResourceSubresourceScale", &[
        (1, "specReplicasPath", Text), (2, "statusReplicasPath", Text), (3, "labelSelectorPath", MaybeText),
    ]),
    ("CustomResourceSubresourceStatus", &[]),
    ("CustomResourceSubresources", &[
        (1, "status", Present("CustomResourceSubresourceStatus")),
        (2, "scale", Message("CustomResourceSubresourceScale")),
    ]),
    ("CustomResourceValidation", &[(1, "openAPIV3Schema", Present("JSONSchemaProps"))]),
    ("ExternalDocumentation", &[(1, "description", Text), (2, "url", Text)]),
    ("JSONSchemaProps", &[
        (1, "id", Text), (2, "$schema", Text), (3, "$ref", MaybeText), (4, "description", Text), (5, "type", Text),
        (6, "format", Text), (7, "title", Text), (8, "default", Json), (9, "maximum", Double),
        (10, "exclusiveMaximum", Bool), (11, "minimum", Double), (12, "exclusiveMinimum", Bool),
        (13, "maxLength", MaybeInt), (14, "minLength", MaybeInt), (15, "pattern", Text), (16, "maxItems", MaybeInt),
        (17, "minItems", MaybeInt), (18, "uniqueItems", Bool), (19, "multipleOf", Double), (20, "enum", Jsons),
        (21, "maxProperties", MaybeInt), (22, "minProperties", MaybeInt), (23, "required", Texts),
        (24, "items", Either("JSONSchemaProps")), (25, "allOf", Messages("JSONSchemaProps")),
        (26, "oneOf", Messages("JSONSchemaProps")), (27, "anyOf", Messages("JSONSchemaProps")),
        (28, "not", Present("JSONSchemaProps")), (29, "properties", MessageMap("JSONSchemaProps")),
        (30, "additionalProperties", SchemaOrBool("JSONSchemaProps")),
        (31, "patternProperties", MessageMap("JSONSchemaProps")),
        (33, "additionalItems", SchemaOrBool("JSONSchemaProps")), (34, "definitions", MessageMap("JSONSchemaProps")),
        (35, "externalDocs", Message("ExternalDocumentation")), (36, "example", Json), (37, "nullable", Bool),
        (38, "x-kubernetes-preserve-unknown-fields", MaybeBool), (39, "x-kubernetes-embedded-resource", Bool),
        (40, "x-kubernetes-int-or-string", Bool), (41, "x-kubernetes-list-map-keys", Texts),
        (42, "x-kubernetes-list-type", MaybeText), (43, "x-kubernetes-map-type", MaybeText),
        (44, "x-kubernetes-validations", Messages("ValidationRule")),
    ]),
    ("SelectableField", &[(1, "jsonPath", Text)]),
    ("ServiceReference", &[(1, "namespace", Text), (2, "name", Text), (3, "path", MaybeText), (4, "port", MaybeInt)]),
    ("ValidationRule", &[
        (1, "rule", Text), (2, "message", Text), (3, "messageExpression", Text), (4, "reason", MaybeText),
        (5, "fieldPath", Text), (6, "optionalOldSelf", MaybeBool),
    ]),
    ("WebhookClientConfig", &[(1, "service", Message("ServiceReference")), (2, "caBundle", Bytes), (3, "url", MaybeText)]),
    ("WebhookConversion", &[
        (2, "clientConfig", Message("WebhookClientConfig")), (3, "conversionReviewVersions", Texts),
    ]),
];
