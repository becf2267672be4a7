//! A field of a protobuf message: its number, its JSON name, its type. Not here: the messages.

/// The type of a field, and its form in JSON.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Type {
    /// A string; empty means absent.
    Text,
    /// A string that may be empty.
    MaybeText,
    /// A boolean; false means absent.
    Bool,
    /// A boolean that may be false.
    MaybeBool,
    /// An integer; zero means absent.
    Int,
    /// An integer that may be zero.
    MaybeInt,
    /// Base64 in JSON.
    Bytes,
    /// RFC 3339 to the second.
    Time,
    /// RFC 3339 to the microsecond.
    MicroTime,
    /// A message around JSON bytes.
    Json,
    /// A message of this name.
    Message(&'static str),
    /// A list of strings.
    Texts,
    /// A message of this name whose JSON fields are inlined into the enclosing message.
    Inline(&'static str),
    /// A list of messages of this name.
    Messages(&'static str),
    /// A map of strings.
    TextMap,
    /// A map of bytes.
    BytesMap,
    /// A map of lists of strings.
    TextsMap,
    /// A floating-point number.
    Double,
    /// A list of messages around JSON bytes.
    Jsons,
    /// A message of this name that is meaningful even when it is empty.
    Present(&'static str),
    /// A map of messages of this name.
    MessageMap(&'static str),
    /// One message of this name, or a list of them.
    Either(&'static str),
    /// A message of this name, or a boolean.
    SchemaOrBool(&'static str),
}

/// Number, JSON name, type.
pub type MessageField = (u64, &'static str, Type);
