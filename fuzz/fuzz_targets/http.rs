#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| tollgate_server::doors::http::fuzz::any_bytes(bytes));
