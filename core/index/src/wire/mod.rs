//! msgpack payload → events, for every dialect of vLLM's publisher from 0.9 on.
//!
//! What must always hold:
//!
//! * One bad event costs that event, never its batch; a payload that is no batch is a [`BatchError`], whatever the bytes.
//! * Lengths that a payload declares are never trusted: nothing is allocated that the payload does not back with bytes,
//!   and events are decoded one by one, so that a payload of many tiny ones costs no memory either.
//! * Nothing is guessed: a field of the wrong type makes a skipped event that says so.
//!
//! The batch is an array `[ts, events, data_parallel_rank?]` (a map with the same names is taken too). Events are arrays
//! with positional fields up to vLLM 0.23 and maps from 0.24 on; both may be mixed. Shorter and longer arrays and unknown
//! map keys are fine. The structure of the whole payload is checked before its first event is given out.

mod event;
mod reader;

use crate::event::Event;
use reader::{Head, Raw, Reader};

/// Bytes; a larger payload is refused unread.
pub const MAX_PAYLOAD: usize = 16 << 20;

/// Of a batch; one with more is refused.
pub const MAX_EVENTS: u32 = 1 << 18;

/// Hashes of a batch; one with more is refused, because lookups wait while a batch is applied. A step of an engine stores
/// and evicts a few thousand blocks at most.
pub const MAX_HASHES: usize = 1 << 17;

/// KV-cache groups of one engine. Models have a handful, and never more than layers; a removal that names none of them
/// is for all.
pub const MAX_GROUPS: i64 = 256;

/// The deepest nesting that is read; the real dialects have six levels.
pub const MAX_DEPTH: u32 = 512;

/// Why a payload is no batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BatchError {
    /// More than [`MAX_PAYLOAD`] bytes, [`MAX_EVENTS`] events or [`MAX_HASHES`] hashes.
    TooLarge,
    /// Empty, cut short, malformed, nested too deeply, or followed by something else.
    NotMsgpack,
    /// Neither array nor map.
    NotABatch,
    /// No timestamp or no events.
    MissingField,
    /// Timestamp, events or rank of the wrong type.
    WrongType,
}

/// A batch whose structure is sound; iterate to decode its events.
#[derive(Debug, Clone)]
pub struct Batch<'a> {
    /// The engine's clock when it published the batch, in seconds.
    pub ts: f64,
    /// The data-parallel rank, where the batch says it.
    pub rank: Option<i128>,
    left: u32,
    events: Reader<'a>,
}

impl<'a> Batch<'a> {
    /// Read a payload's frame and check its structure.
    ///
    /// # Errors
    /// [`BatchError`] when it is not an event batch.
    pub fn decode(payload: &'a [u8]) -> Result<Self, BatchError> {
        if payload.len() > MAX_PAYLOAD {
            return Err(BatchError::TooLarge);
        }
        let fields = Fields::read(payload)?;
        let (Some(ts), Some(events)) = (fields.ts, fields.events) else {
            return Err(BatchError::MissingField);
        };
        let ts = ts.reader().number().ok_or(BatchError::WrongType)?;
        let mut events = events.reader();
        let Ok(Head::Array(left)) = events.head() else {
            return Err(BatchError::WrongType);
        };
        if left > MAX_EVENTS {
            return Err(BatchError::TooLarge);
        }
        let rank = match fields.rank {
            Some(raw) => raw.reader().optional_int().ok_or(BatchError::WrongType)?,
            None => None,
        };
        let batch = Self { ts, rank, left, events };
        if payload.len() > MAX_HASHES && batch.has_too_many_hashes() {
            return Err(BatchError::TooLarge);
        }
        Ok(batch)
    }

    /// Counts them, which a payload of fewer bytes can do without.
    fn has_too_many_hashes(&self) -> bool {
        let mut left = MAX_HASHES;
        self.clone().any(|event| match left.checked_sub(event.hashes().len()) {
            Some(fewer) => {
                left = fewer;
                false
            }
            None => true,
        })
    }
}

impl<'a> Iterator for Batch<'a> {
    type Item = Event<'a>;

    fn next(&mut self) -> Option<Self::Item> {
        self.left = self.left.checked_sub(1)?;
        Some(event::decode(&mut self.events))
    }
}

#[derive(Default)]
struct Fields<'a> {
    ts: Option<Raw<'a>>,
    events: Option<Raw<'a>>,
    rank: Option<Raw<'a>>,
}

impl<'a> Fields<'a> {
    fn read(payload: &'a [u8]) -> Result<Self, BatchError> {
        let mut reader = Reader::new(payload);
        let mut fields = Self::default();
        match payload.first() {
            None => return Err(BatchError::NotMsgpack),
            Some(0x80..=0x9f | 0xdc..=0xdf) => {}
            Some(_) => return Err(BatchError::NotABatch),
        }
        match reader.head().map_err(|_| BatchError::NotMsgpack)? {
            Head::Array(length) => {
                for at in 0..length {
                    let raw = reader.raw().map_err(|_| BatchError::NotMsgpack)?;
                    match at {
                        0 => fields.ts = Some(raw),
                        1 => fields.events = Some(raw),
                        2 => fields.rank = Some(raw),
                        _ => {}
                    }
                }
            }
            Head::Map(length) => {
                for _ in 0..length {
                    let name = reader.text().map_err(|_| BatchError::NotMsgpack)?;
                    let raw = reader.raw().map_err(|_| BatchError::NotMsgpack)?;
                    match name {
                        "ts" => fields.ts = Some(raw),
                        "events" => fields.events = Some(raw),
                        "data_parallel_rank" => fields.rank = Some(raw),
                        _ => {}
                    }
                }
            }
            _ => return Err(BatchError::NotABatch),
        }
        if reader.is_at_end() { Ok(fields) } else { Err(BatchError::NotMsgpack) }
    }
}

#[cfg(test)]
mod tests;
