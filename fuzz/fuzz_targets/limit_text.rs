#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| tollgate_testkit::fuzz::limit_text(bytes));
