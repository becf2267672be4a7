//! OpenAI's Responses API: requests of items, and responses that are items too, whole or as a stream of typed events. Where
//! the gateway has a store they are kept; elsewhere what needs a kept one is refused by name.

pub(super) mod codex_models;
pub(super) mod compact;
mod event;
mod fields;
mod input;
pub(super) mod kept;
mod output;
mod request;
mod response;
mod settings;
mod text_format;
mod tools;
mod writer;

pub(super) use request::parse;
