//! One event: split into its fields first, so that the reader stands behind it whatever is wrong with it.

use std::borrow::Cow;

use super::MAX_GROUPS;
use super::reader::{Any, Head, Malformed, Raw, Reader};
use crate::event::{Adapter, EngineHash, Event, ExtraKey, Removed, Run, SkipReason, Stored, Tier};
use crate::hits::Kind;

// The fields that matter, in the order of BlockStored's array form (positions 1 to 11); those behind come in maps only.
const HASHES: usize = 0;
const PARENT: usize = 1;
const TOKENS: usize = 2;
const BLOCK_SIZE: usize = 3;
const LORA_ID: usize = 4;
const MEDIUM: usize = 5;
const LORA_NAME: usize = 6;
const EXTRA_KEYS: usize = 7;
const GROUP: usize = 8;
const KIND: usize = 9;
const WINDOW: usize = 10;
const SESSION: usize = 11;
const REMAINING: usize = 12;
/// The tag of a map.
const TYPE: usize = 13;
const FIELDS: usize = 14;

const STORED_POSITIONS: [usize; 11] = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10];
const REMOVED_POSITIONS: [usize; 3] = [HASHES, MEDIUM, GROUP];

fn field_of(name: &[u8]) -> Option<usize> {
    let (field, its_name): (usize, &[u8]) = match name.len() {
        4 => (TYPE, b"type"),
        6 => (MEDIUM, b"medium"),
        7 => (LORA_ID, b"lora_id"),
        9 if name[0] == b't' => (TOKENS, b"token_ids"),
        9 if name[0] == b'l' => (LORA_NAME, b"lora_name"),
        9 => (GROUP, b"group_idx"),
        10 if name[0] == b'b' => (BLOCK_SIZE, b"block_size"),
        10 if name[0] == b'e' => (EXTRA_KEYS, b"extra_keys"),
        10 => (SESSION, b"session_id"),
        12 => (HASHES, b"block_hashes"),
        17 => (PARENT, b"parent_block_hash"),
        18 => (KIND, b"kv_cache_spec_kind"),
        21 => (REMAINING, b"remaining_copy_counts"),
        28 => (WINDOW, b"kv_cache_spec_sliding_window"),
        _ => return None,
    };
    (name == its_name).then_some(field)
}

/// Raw values by field.
type Raws<'a> = [Option<Raw<'a>>; FIELDS];

/// Fields as they stand in the event.
#[derive(Default)]
struct Fields<'a> {
    raw: Raws<'a>,
    /// Tokens are read where they stand: stepping over them first would cost as much again.
    tokens: Option<Result<Option<Vec<u32>>, Malformed>>,
}

impl<'a> Fields<'a> {
    /// Read the value of a field.
    fn take(&mut self, field: usize, reader: &mut Reader<'a>) -> Read<()> {
        if field == TOKENS {
            self.tokens = Some(reader.u32s());
        } else {
            self.raw[field] = Some(reader.raw().map_err(wrong_type)?);
        }
        Ok(())
    }
}

type Read<T> = Result<T, SkipReason>;

/// Decode the event at which the reader stands; its structure was checked with the batch's.
pub(super) fn decode<'a>(reader: &mut Reader<'a>) -> Event<'a> {
    let mut tag = "";
    let event = match reader.peek() {
        Some(0x90..=0x9f | 0xdc | 0xdd) => from_array(reader, &mut tag),
        Some(0x80..=0x8f | 0xde | 0xdf) => from_map(reader, &mut tag),
        _ => reader.raw().map_err(wrong_type).and(Err(SkipReason::NotAnEvent)),
    };
    event.unwrap_or_else(|reason| Event::Skipped { reason, may_remove: may_remove(tag) })
}

fn wrong_type(_: Malformed) -> SkipReason {
    SkipReason::WrongType
}

/// Blocks may have left by an event of this kind; "" is a kind that could not be read.
fn may_remove(tag: &str) -> bool {
    let folded = tag.to_ascii_lowercase();
    tag.is_empty() || ["remove", "clear", "evict"].iter().any(|word| folded.contains(word))
}

fn tag_of(raw: Raw<'_>) -> Read<&str> {
    raw.reader().text().map_err(|_| SkipReason::NoTag)
}

fn from_array<'a>(reader: &mut Reader<'a>, tag: &mut &'a str) -> Read<Event<'a>> {
    let Ok(Head::Array(length)) = reader.head() else {
        return Err(SkipReason::WrongType);
    };
    if length == 0 {
        return Err(SkipReason::NoTag);
    }
    let kind = tag_of(reader.raw().map_err(wrong_type)?);
    let positions = if kind == Ok("BlockRemoved") { &REMOVED_POSITIONS[..] } else { &STORED_POSITIONS };
    let mut fields = Fields::default();
    for at in 0..length as usize - 1 {
        match positions.get(at) {
            Some(field) => fields.take(*field, reader)?,
            None => reader.raw().map(drop).map_err(wrong_type)?,
        }
    }
    *tag = kind?;
    build(tag, fields)
}

fn from_map<'a>(reader: &mut Reader<'a>, tag: &mut &'a str) -> Read<Event<'a>> {
    let Ok(Head::Map(length)) = reader.head() else {
        return Err(SkipReason::WrongType);
    };
    let mut fields = Fields::default();
    let mut names_are_text = true;
    for _ in 0..length {
        let name = reader.string().map_err(wrong_type)?;
        if let Some(field) = name.and_then(field_of) {
            fields.take(field, reader)?;
            continue;
        }
        reader.raw().map_err(wrong_type)?;
        names_are_text &= name.is_some_and(|name| std::str::from_utf8(name).is_ok());
    }
    if !names_are_text {
        return Err(SkipReason::WrongType);
    }
    *tag = tag_of(fields.raw[TYPE].ok_or(SkipReason::NoTag)?)?;
    build(tag, fields)
}

fn build<'a>(tag: &str, fields: Fields<'a>) -> Read<Event<'a>> {
    match tag {
        "BlockStored" => stored(fields).map(Event::Stored),
        "BlockRemoved" => removed(&fields.raw).map(Event::Removed),
        "AllBlocksCleared" => Ok(Event::Cleared),
        _ => Err(SkipReason::UnknownTag),
    }
}

/// The order of the checks decides which reason an event with several faults gives.
fn stored(fields: Fields<'_>) -> Read<Stored<'_>> {
    let Fields { raw: fields, tokens } = fields;
    let fields = &fields;
    let hashes = hashes(fields)?;
    let parent = match fields[PARENT] {
        Some(raw) if !raw.is_nil() => Some(hash(raw.reader().any().map_err(wrong_type)?)?),
        _ => None,
    };
    let lora_name = optional_text(fields, LORA_NAME)?;
    let lora_id = optional_int(fields, LORA_ID)?;
    let block_size = optional_int(fields, BLOCK_SIZE)?.unwrap_or(0);
    let block_size = u32::try_from(block_size).ok().filter(|size| *size < 1 << 31).ok_or(SkipReason::BadBlockSize)?;
    let tokens = tokens.transpose().map_err(|_| SkipReason::BadToken)?.flatten().unwrap_or_default();
    let tier = Tier::of_medium(optional_text(fields, MEDIUM)?);
    let extra_keys = extra_keys(fields[EXTRA_KEYS], hashes.len(), lora_name, parent.is_none())?;
    let group = group(fields)?.unwrap_or(0);
    let kind = optional_text(fields, KIND)?.map(Kind::of_spec);
    let window = optional_int(fields, WINDOW)?;
    optional_text(fields, SESSION)?;
    let adapter = Adapter::new(lora_name.map(Cow::Borrowed), lora_id.unwrap_or(-1));
    let run = Run { hashes, parent, tokens, block_size, adapter, extra_keys };
    Ok(Stored { run, tier, group, kind, window })
}

fn removed<'a>(fields: &Raws<'a>) -> Read<Removed<'a>> {
    let hashes = hashes(fields)?;
    let remaining = match fields[REMAINING] {
        Some(raw) => raw.reader().u32s().map_err(wrong_type)?,
        None => None,
    };
    if remaining.as_ref().is_some_and(|counts| counts.len() != hashes.len()) {
        return Err(SkipReason::WrongType);
    }
    let tier = Tier::of_medium(optional_text(fields, MEDIUM)?);
    Ok(Removed { hashes, tier, group: group(fields)?, remaining })
}

fn optional_text<'a>(fields: &Raws<'a>, field: usize) -> Read<Option<&'a str>> {
    fields[field].map_or(Ok(None), |raw| raw.reader().optional_text().ok_or(SkipReason::WrongType))
}

fn optional_int(fields: &Raws<'_>, field: usize) -> Read<Option<i64>> {
    let Some(raw) = fields[field] else {
        return Ok(None);
    };
    match raw.reader().head() {
        Ok(Head::Nil) => Ok(None),
        Ok(Head::Int(value)) => Ok(Some(value)),
        _ => Err(SkipReason::WrongType),
    }
}

fn group(fields: &Raws<'_>) -> Read<Option<i64>> {
    let group = optional_int(fields, GROUP)?;
    if group.is_some_and(|group| !(0..MAX_GROUPS).contains(&group)) { Err(SkipReason::BadGroup) } else { Ok(group) }
}

fn hashes<'a>(fields: &Raws<'a>) -> Read<Vec<EngineHash<'a>>> {
    let raw = fields[HASHES].ok_or(SkipReason::MissingField)?;
    let mut reader = raw.reader();
    let Ok(Head::Array(length)) = reader.head() else {
        return Err(SkipReason::WrongType);
    };
    let mut hashes = Vec::with_capacity((length as usize).min(raw.0.len()));
    // one that can't be read at all outweighs one that is no hash, wherever it stands
    let mut bad = None;
    for _ in 0..length {
        if let Some(hash) = reader.u64() {
            hashes.push(EngineHash::Unsigned(hash));
            continue;
        }
        match hash(reader.any().map_err(wrong_type)?) {
            Ok(hash) => hashes.push(hash),
            Err(reason) => bad = Some(reason),
        }
    }
    bad.map_or(Ok(hashes), Err)
}

fn hash(value: Any<'_>) -> Read<EngineHash<'_>> {
    match value {
        Any::Int(value) => Ok(u64::try_from(value).map_or(EngineHash::Negative(value), EngineHash::Unsigned)),
        Any::Large(value) => Ok(EngineHash::Unsigned(value)),
        Any::Bytes(bytes) if (1..=EngineHash::MAX_BYTES).contains(&bytes.len()) => Ok(EngineHash::Bytes(bytes.into())),
        Any::Text(text) if (1..=EngineHash::MAX_TEXT).contains(&text.len()) => Ok(EngineHash::Text(text.into())),
        _ => Err(SkipReason::BadHash),
    }
}

fn extra_keys<'a>(
    raw: Option<Raw<'a>>,
    blocks: usize,
    lora_name: Option<&str>,
    at_root: bool,
) -> Read<Option<Vec<Vec<ExtraKey<'a>>>>> {
    let Some(raw) = raw.filter(|raw| !raw.is_nil()) else {
        return Ok(None);
    };
    let mut reader = raw.reader();
    let Ok(Head::Array(length)) = reader.head() else {
        return Err(SkipReason::WrongType);
    };
    if length as usize != blocks {
        return Err(SkipReason::WrongType);
    }
    if reader.clone().nils(blocks) {
        return Ok(Some(Vec::new()));
    }
    let mut per_block = Vec::with_capacity(blocks);
    for at in 0..blocks {
        let keys = reader.raw().map_err(wrong_type)?;
        per_block.push(if keys.is_nil() { Vec::new() } else { typed(keys, lora_name, at_root && at == 0)? });
    }
    Ok(Some(per_block))
}

/// Give the untagged extra keys of one block their kinds (vLLM sends adapter, images, salt, embeds, in that order).
///
/// The adapter's name is the first string that equals `lora_name`; it is left out, since the adapter is part of the
/// context. Another string is the salt in a prompt's first block, and an image's identifier in later ones (0.17, 0.18).
fn typed<'a>(keys: Raw<'a>, lora_name: Option<&str>, first_block: bool) -> Read<Vec<ExtraKey<'a>>> {
    let mut reader = keys.reader();
    let Ok(Head::Array(length)) = reader.head() else {
        return Err(SkipReason::WrongType);
    };
    let mut typed = Vec::new();
    let mut adapter = lora_name;
    for _ in 0..length {
        let raw = reader.raw().map_err(wrong_type)?;
        match raw.reader().any().map_err(wrong_type)? {
            Any::Text(text) if Some(text) == adapter => adapter = None,
            Any::Text(text) if first_block => typed.push(ExtraKey::Salt(text.into())),
            Any::Text(text) => typed.push(ExtraKey::Image(text.into(), None)),
            Any::Bytes(digest) => typed.push(ExtraKey::Embeds(digest.into())),
            Any::Array(2) => typed.push(pair(raw)?),
            _ => typed.push(ExtraKey::Opaque(raw.0.into())),
        }
    }
    Ok(typed)
}

/// (identifier, offset) is an image from 0.19 on.
fn pair(raw: Raw<'_>) -> Read<ExtraKey<'_>> {
    let mut reader = raw.reader();
    reader.head().map_err(wrong_type)?;
    let (identifier, offset) = (reader.any().map_err(wrong_type)?, reader.any().map_err(wrong_type)?);
    Ok(match (identifier, offset) {
        (Any::Text(identifier), Any::Int(offset)) => ExtraKey::Image(identifier.into(), Some(offset.into())),
        (Any::Text(identifier), Any::Large(offset)) => ExtraKey::Image(identifier.into(), Some(offset.into())),
        _ => ExtraKey::Opaque(raw.0.into()),
    })
}
