//! The schema of a kind: a CRD's `openAPIV3Schema`, compiled once, then used to prune, default, validate and
//! apply.
//!
//! Not here: the lifecycle of CRDs (names, conditions), publishing OpenAPI.

pub mod bounds;
pub mod builtin;
pub mod canonical;
pub mod cel;
pub mod default;
pub mod format;
pub mod prune;
pub mod re2;
pub mod read;
pub mod strict;
pub mod structural;
pub mod time;
pub mod validate;
pub mod values;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use serde_json::Value;

/// A structural schema; the root describes a whole object.
#[derive(Debug, Clone, Default)]
pub struct Schema {
    /// The JSON type.
    pub kind: SchemaType,
    /// Whether `null` is allowed.
    pub nullable: bool,
    /// Named fields.
    pub properties: BTreeMap<String, Schema>,
    /// The schema of other fields (`additionalProperties`).
    pub additional: Additional,
    /// The schema of a list's elements.
    pub items: Option<Box<Schema>>,
    /// The default of a missing field.
    pub default: Option<Value>,
    /// Unknown fields are preserved (`x-kubernetes-preserve-unknown-fields`).
    pub preserve_unknown: bool,
    /// An embedded object, with apiVersion, kind and metadata.
    pub embedded_resource: bool,
    /// The list type.
    pub list: ListKind,
    /// Whether a map has a single owner (`x-kubernetes-map-type: atomic`).
    pub atomic_map: bool,
    /// Value validations.
    pub checks: Checks,
    /// The compiled `x-kubernetes-validations` of this node.
    pub rules: Option<Arc<cel::Rules>>,
}

/// A JSON type of structural schemas.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum SchemaType {
    /// No type: in value validations, and in nodes that preserve unknown fields.
    #[default]
    Any,
    /// `object`
    Object,
    /// `array`
    Array,
    /// `string`
    String,
    /// `integer`
    Integer,
    /// `number`
    Number,
    /// `boolean`
    Boolean,
    /// `x-kubernetes-int-or-string`
    IntOrString,
}

/// The value of `additionalProperties`.
#[derive(Debug, Clone, Default)]
pub enum Additional {
    /// Absent: no other fields.
    #[default]
    Denied,
    /// `true`: any value, without a schema.
    Anything,
    /// Every other field has this schema.
    Typed(Box<Schema>),
}

/// The list type (`x-kubernetes-list-type`).
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum ListKind {
    /// The list is one value.
    #[default]
    Atomic,
    /// Scalars, each at most once.
    Set,
    /// Objects identified by these key fields.
    Map(Vec<String>),
}

/// Value validations.
#[derive(Debug, Clone, Default)]
pub struct Checks {
    /// A named format; unknown names validate nothing.
    pub format: String,
    /// The allowed values.
    pub one_value_of: Option<Vec<Value>>,
    /// A compiled regular expression.
    pub pattern: Option<re2::Pattern>,
    /// The minimum, and whether it is exclusive.
    pub minimum: Option<(f64, bool)>,
    /// The maximum, and whether it is exclusive.
    pub maximum: Option<(f64, bool)>,
    /// The value must be a multiple of this number.
    pub multiple_of: Option<f64>,
    /// Length of a string in characters.
    pub length: SizeRange,
    /// Number of elements of a list.
    pub items: SizeRange,
    /// Number of fields of a map.
    pub properties: SizeRange,
    /// Required fields.
    pub required: Vec<String>,
    /// All of these must hold.
    pub all_of: Vec<Schema>,
    /// At least one of these must hold.
    pub any_of: Vec<Schema>,
    /// Exactly one of these must hold.
    pub one_of: Vec<Schema>,
    /// This must not hold.
    pub not: Option<Box<Schema>>,
}

/// An inclusive range of sizes.
#[derive(Debug, Clone, Copy, Default)]
pub struct SizeRange {
    /// The minimum.
    pub min: Option<u64>,
    /// The maximum.
    pub most: Option<u64>,
}

/// Why a CRD's schema is rejected.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Issue {
    /// Path below `openAPIV3Schema`, such as `properties[spec].type`; empty for the schema itself.
    pub path: String,
    /// `Required value: must not be empty for specified object fields`.
    pub message: String,
}

impl fmt::Display for Issue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.path, self.message)
    }
}

/// One validation failure, in the format of a `StatusCause`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FieldError {
    /// `FieldValueInvalid`, `FieldValueRequired`, `FieldValueNotSupported`, `FieldValueDuplicate`, …
    pub reason: &'static str,
    /// `spec.replicas`.
    pub field: String,
    /// `Invalid value: "string": spec.replicas in body must be of type integer: "string"`.
    pub message: String,
}

impl fmt::Display for FieldError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.field, self.message)
    }
}

impl Schema {
    /// Compiles a CRD version's `openAPIV3Schema`: checks the structural rules and compiles its CEL rules.
    ///
    /// The result also describes apiVersion, kind and metadata, whatever the source declares for them.
    pub fn from_openapi(source: &Value) -> Result<Schema, Vec<Issue>> {
        let issues = structural::check(source);
        if !issues.is_empty() {
            return Err(issues);
        }
        let mut schema = read::schema(source);
        let issues = default::check(&schema);
        if !issues.is_empty() {
            return Err(issues);
        }
        read::complete_root(&mut schema);
        Ok(schema)
    }

    /// The schema of an object of which only the metadata is known.
    pub fn open() -> Schema {
        let mut schema = Schema { kind: SchemaType::Object, preserve_unknown: true, ..Default::default() };
        read::complete_root(&mut schema);
        schema
    }

    /// The schema of the field `name`, if the schema describes it.
    pub fn field(&self, name: &str) -> Option<&Schema> {
        match (self.properties.get(name), &self.additional) {
            (Some(schema), _) => Some(schema),
            (None, Additional::Typed(schema)) => Some(schema),
            (None, Additional::Anything | Additional::Denied) => None,
        }
    }

    /// Removes unknown fields and returns their paths (`spec.foo`, `spec.list[0].bar`), sorted.
    pub fn prune(&self, object: &mut Value) -> Vec<String> {
        prune::prune(self, object)
    }

    /// Drops nulls without meaning, then fills in defaults.
    pub fn default(&self, object: &mut Value) {
        default::fill(self, object);
    }

    /// Validates a whole object. With `old`, runs transition rules and ignores errors of unchanged values
    /// (ratcheting).
    pub fn validate(&self, new: &Value, old: Option<&Value>) -> Vec<FieldError> {
        validate::validate_object(self, new, old)
    }
}
