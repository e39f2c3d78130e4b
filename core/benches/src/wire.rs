//! Event batches as vLLM 0.32 encodes them, written as compactly as its msgpack library does.

/// One event: blocks entered the GPU's cache.
#[must_use]
pub(crate) fn stored(hashes: &[u64], parent: Option<u64>, tokens: &[u32], block_size: usize) -> Vec<u8> {
    let mut out = Vec::with_capacity(200 + hashes.len() * 10 + tokens.len() * 5);
    head(&mut out, 0x80, 11);
    text(&mut out, "type");
    text(&mut out, "BlockStored");
    text(&mut out, "block_hashes");
    array(&mut out, hashes.len());
    hashes.iter().for_each(|hash| int(&mut out, *hash));
    text(&mut out, "parent_block_hash");
    match parent {
        Some(hash) => int(&mut out, hash),
        None => nil(&mut out),
    }
    text(&mut out, "token_ids");
    array(&mut out, tokens.len());
    tokens.iter().for_each(|token| int(&mut out, u64::from(*token)));
    text(&mut out, "block_size");
    int(&mut out, block_size as u64);
    text(&mut out, "lora_id");
    nil(&mut out);
    text(&mut out, "medium");
    text(&mut out, "GPU");
    text(&mut out, "lora_name");
    nil(&mut out);
    text(&mut out, "extra_keys");
    array(&mut out, hashes.len());
    hashes.iter().for_each(|_| nil(&mut out));
    text(&mut out, "group_idx");
    int(&mut out, 0);
    text(&mut out, "kv_cache_spec_kind");
    text(&mut out, "full_attention");
    out
}

/// One event: a block left it. Engines send one for each block that they evict.
#[must_use]
pub(crate) fn removed(hash: u64) -> Vec<u8> {
    let mut out = Vec::with_capacity(80);
    head(&mut out, 0x80, 4);
    text(&mut out, "type");
    text(&mut out, "BlockRemoved");
    text(&mut out, "block_hashes");
    array(&mut out, 1);
    int(&mut out, hash);
    text(&mut out, "medium");
    text(&mut out, "GPU");
    text(&mut out, "group_idx");
    int(&mut out, 0);
    out
}

/// One event: the cache is empty.
#[must_use]
pub(crate) fn cleared() -> Vec<u8> {
    let mut out = Vec::new();
    head(&mut out, 0x80, 1);
    text(&mut out, "type");
    text(&mut out, "AllBlocksCleared");
    out
}

/// One message's payload.
#[must_use]
pub(crate) fn batch(events: &[Vec<u8>]) -> Vec<u8> {
    let mut out = Vec::with_capacity(24 + events.iter().map(Vec::len).sum::<usize>());
    head(&mut out, 0x90, 3);
    out.push(0xcb);
    out.extend_from_slice(&1.0_f64.to_be_bytes());
    array(&mut out, events.len());
    events.iter().for_each(|event| out.extend_from_slice(event));
    int(&mut out, 0);
    out
}

/// Of a map or an array that is known to be short.
fn head(out: &mut Vec<u8>, kind: u8, length: u8) {
    assert!(length < 16);
    out.push(kind | length);
}

fn array(out: &mut Vec<u8>, length: usize) {
    match u16::try_from(length).expect("a length below 65,536") {
        short @ 0..16 => out.push(0x90 | short.to_be_bytes()[1]),
        length => {
            out.push(0xdc);
            out.extend_from_slice(&length.to_be_bytes());
        }
    }
}

fn text(out: &mut Vec<u8>, text: &str) {
    let length = u8::try_from(text.len()).expect("a short name");
    assert!(length < 32);
    out.push(0xa0 | length);
    out.extend_from_slice(text.as_bytes());
}

fn nil(out: &mut Vec<u8>) {
    out.push(0xc0);
}

fn int(out: &mut Vec<u8>, value: u64) {
    let bytes = value.to_be_bytes();
    let (kind, width) = match value {
        0..0x80 => return out.push(bytes[7]),
        0x80..=0xff => (0xcc, 1),
        0x100..=0xffff => (0xcd, 2),
        0x1_0000..=0xffff_ffff => (0xce, 4),
        _ => (0xcf, 8),
    };
    out.push(kind);
    out.extend_from_slice(&bytes[8 - width..]);
}
