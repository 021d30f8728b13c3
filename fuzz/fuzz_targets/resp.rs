#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| tidegate_server::listeners::resp::fuzz::any_bytes(bytes));
