//! The schema of a kind: what a CRD's `openAPIV3Schema` says, read once, then used to prune, default, validate and apply.
//!
//! Not here: the lifecycle of CRDs (names, conditions), publishing OpenAPI.

pub mod cel;
pub mod default;
pub mod format;
pub mod prune;
pub mod read;
pub mod strict;
pub mod structural;
pub mod validate;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use serde_json::Value;

/// A structural schema; the root describes a whole object.
#[derive(Debug, Clone, Default)]
pub struct Schema {
    /// The JSON type.
    pub kind: SchemaType,
    /// Whether `null` is a value.
    pub nullable: bool,
    /// Named fields.
    pub properties: BTreeMap<String, Schema>,
    /// The values of a map.
    pub additional: Additional,
    /// The elements of a list.
    pub items: Option<Box<Schema>>,
    /// What a missing field becomes.
    pub default: Option<Value>,
    /// Free content below here is kept (`x-kubernetes-preserve-unknown-fields`).
    pub preserve_unknown: bool,
    /// A whole object of its own, with apiVersion, kind and metadata.
    pub embedded_resource: bool,
    /// How the elements of a list are told apart.
    pub list: ListKind,
    /// Whether a map is owned as one value (`x-kubernetes-map-type: atomic`).
    pub atomic_map: bool,
    /// Restrictions of the value.
    pub checks: Checks,
    /// The compiled `x-kubernetes-validations` of this node.
    pub rules: Option<Arc<cel::Rules>>,
}

/// A JSON type, as structural schemas know them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum SchemaType {
    /// Not said: value validations, and nodes that preserve unknown fields.
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

/// What `additionalProperties` says.
#[derive(Debug, Clone, Default)]
pub enum Additional {
    /// Nothing: no other fields.
    #[default]
    Denied,
    /// `true`: anything, without a schema.
    Anything,
    /// Every other value has this schema.
    Typed(Box<Schema>),
}

/// How the elements of a list are told apart (`x-kubernetes-list-type`).
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum ListKind {
    /// The list is one value.
    #[default]
    Atomic,
    /// Scalars, each at most once.
    Set,
    /// Objects, told apart by these fields.
    Map(Vec<String>),
}

/// Restrictions of a value.
#[derive(Debug, Clone, Default)]
pub struct Checks {
    /// A named format; unknown names restrict nothing.
    pub format: String,
    /// The allowed values.
    pub one_value_of: Option<Vec<Value>>,
    /// A regular expression, with its source.
    pub pattern: Option<regex::Regex>,
    /// The least number, and whether it is excluded.
    pub minimum: Option<(f64, bool)>,
    /// The greatest number, and whether it is excluded.
    pub maximum: Option<(f64, bool)>,
    /// A number that divides the value.
    pub multiple_of: Option<f64>,
    /// Bounds of a string's length in characters.
    pub length: SizeRange,
    /// Bounds of a list's length.
    pub items: SizeRange,
    /// Bounds of a map's size.
    pub properties: SizeRange,
    /// Fields that must be there.
    pub required: Vec<String>,
    /// All of these hold.
    pub all_of: Vec<Schema>,
    /// At least one of these holds.
    pub any_of: Vec<Schema>,
    /// Exactly one of these holds.
    pub one_of: Vec<Schema>,
    /// This does not hold.
    pub not: Option<Box<Schema>>,
}

/// An inclusive range of sizes.
#[derive(Debug, Clone, Copy, Default)]
pub struct SizeRange {
    /// No fewer.
    pub min: Option<u64>,
    /// No more.
    pub most: Option<u64>,
}

/// Why a schema is refused at CRD registration.
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

/// One validation failure, in the shape of a `StatusCause`.
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
    /// Reads a CRD version's `openAPIV3Schema`, checks the structural rules and compiles its CEL rules.
    ///
    /// The result also describes apiVersion, kind and metadata, whatever the source says of them.
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

    /// The schema of an object of which nothing is known but its metadata.
    pub fn open() -> Schema {
        let mut schema = Schema { kind: SchemaType::Object, preserve_unknown: true, ..Default::default() };
        read::complete_root(&mut schema);
        schema
    }

    /// The schema of the field `name`, if the schema has a say about it.
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

    /// Drops nulls that mean nothing, then fills in defaults.
    pub fn default(&self, object: &mut Value) {
        default::fill(self, object);
    }

    /// Validates a whole object; with `old`, runs transition rules and forgives errors on unchanged values.
    pub fn validate(&self, new: &Value, old: Option<&Value>) -> Vec<FieldError> {
        validate::validate_object(self, new, old)
    }
}
