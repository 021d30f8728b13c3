//! The tokens in `vectors/` were signed with OpenSSL, and their private keys deleted. Both have the claims
//! `{"sub":"42","plan":"pro","exp":1770120000}`.

use hmac::{Hmac, KeyInit, Mac};
use serde_json::json;
use sha2::Sha256;

use super::*;

const SECRET: &[u8] = b"0123456789abcdef0123456789abcdef";
const RS256_PEM: &[u8] = include_bytes!("vectors/rs256.pem");
const RS256_TOKEN: &str = include_str!("vectors/rs256.jwt");
const ES256_PEM: &[u8] = include_bytes!("vectors/es256.pem");
const ES256_TOKEN: &str = include_str!("vectors/es256.jwt");
const EXP_S: u64 = 1_770_120_000;

fn at(seconds: u64) -> Timestamp {
    Timestamp::from_micros(seconds * 1_000_000)
}

fn encode(json: &Value) -> String {
    URL_SAFE_NO_PAD.encode(json.to_string())
}

fn sign(secret: &[u8], header: &Value, claims: &Value) -> String {
    let message = format!("{}.{}", encode(header), encode(claims));
    let mut mac = <Hmac<Sha256>>::new_from_slice(secret).unwrap();
    mac.update(message.as_bytes());
    format!("{message}.{}", URL_SAFE_NO_PAD.encode(mac.finalize().into_bytes()))
}

fn hs256(claims: &Value) -> String {
    sign(SECRET, &json!({"alg": "HS256", "typ": "JWT"}), claims)
}

fn verifier() -> TokenVerifier {
    TokenVerifier::hs256(SECRET).unwrap().with_leeway(Duration::ZERO)
}

#[test]
fn valid_token_of_each_algorithm_gives_its_user_and_plan() {
    let claims = json!({"sub": "42", "plan": "pro", "exp": EXP_S});
    for (verifier, token) in [
        (TokenVerifier::hs256(SECRET).unwrap(), hs256(&claims).as_str()),
        (TokenVerifier::rs256(RS256_PEM).unwrap(), RS256_TOKEN.trim_ascii()),
        (TokenVerifier::es256(ES256_PEM).unwrap(), ES256_TOKEN.trim_ascii()),
    ] {
        let user = verifier.clone().with_plan_claim("plan").verify(token.as_bytes(), at(EXP_S - 1)).unwrap();
        assert_eq!((&*user.subject, user.plan.as_deref()), ("42", Some("pro")));
        assert_eq!(verifier.verify(token.as_bytes(), at(EXP_S - 1)).unwrap().plan, None);
    }
}

#[test]
fn changed_token_is_rejected() {
    let claims = json!({"sub": "42", "exp": EXP_S});
    for (verifier, token) in [
        (TokenVerifier::hs256(SECRET).unwrap(), hs256(&claims).as_str()),
        (TokenVerifier::rs256(RS256_PEM).unwrap(), RS256_TOKEN.trim_ascii()),
        (TokenVerifier::es256(ES256_PEM).unwrap(), ES256_TOKEN.trim_ascii()),
    ] {
        assert!(verifier.verify(token.as_bytes(), at(0)).is_ok());
        for place in (0..token.len()).step_by(7).chain([token.len() - 1]) {
            let mut changed = token.as_bytes().to_vec();
            changed[place] = if changed[place] == b'A' { b'Z' } else { b'A' };
            assert!(verifier.verify(&changed, at(0)).is_err(), "byte {place} of {token}");
        }
        let (message, _) = token.rsplit_once('.').unwrap();
        assert_eq!(verifier.verify(format!("{message}.").as_bytes(), at(0)), Err(TokenError::Signature));
    }
}

#[test]
fn token_that_names_another_algorithm_is_rejected() {
    let claims = json!({"sub": "admin", "exp": EXP_S});
    let none = |alg: &str| format!("{}.{}.", encode(&json!({"alg": alg})), encode(&claims));
    let verifiers = [
        TokenVerifier::hs256(SECRET).unwrap(),
        TokenVerifier::rs256(RS256_PEM).unwrap(),
        TokenVerifier::es256(ES256_PEM).unwrap(),
    ];
    for verifier in &verifiers {
        for alg in ["none", "None", "NONE", "", "hs256", "HS384", "PS256", "EdDSA"] {
            let token = none(alg);
            assert_eq!(verifier.verify(token.as_bytes(), at(0)), Err(TokenError::Algorithm), "{verifier:?} {alg}");
        }
    }
    // Signed with the bytes of the public key as an HMAC secret.
    for (verifier, pem) in [(&verifiers[1], RS256_PEM), (&verifiers[2], ES256_PEM)] {
        let forged = sign(pem, &json!({"alg": "HS256"}), &claims);
        assert_eq!(verifier.verify(forged.as_bytes(), at(0)), Err(TokenError::Algorithm));
        let alg = verifier.key.algorithm();
        let forged = sign(pem, &json!({"alg": alg}), &claims);
        assert_eq!(verifier.verify(forged.as_bytes(), at(0)), Err(TokenError::Signature));
        assert!(TokenVerifier::hs256(pem).unwrap_err().to_string().contains("PEM"));
    }
    for (token, verifier) in [(RS256_TOKEN, &verifiers[0]), (RS256_TOKEN, &verifiers[2]), (ES256_TOKEN, &verifiers[1])]
    {
        assert_eq!(verifier.verify(token.trim_ascii().as_bytes(), at(0)), Err(TokenError::Algorithm));
    }
}

#[test]
fn token_with_a_critical_extension_is_rejected() {
    let token =
        sign(SECRET, &json!({"alg": "HS256", "crit": ["b64"], "b64": false}), &json!({"sub": "42", "exp": EXP_S}));
    assert_eq!(verifier().verify(token.as_bytes(), at(0)), Err(TokenError::Algorithm));
}

#[test]
fn times_are_compared_with_the_time_passed_in_to_the_microsecond() {
    let token = hs256(&json!({"sub": "42", "exp": EXP_S, "nbf": EXP_S - 60}));
    let verify = |verifier: &TokenVerifier, now: Timestamp| verifier.verify(token.as_bytes(), now).map(|_| ());
    let strict = verifier();
    assert_eq!(verify(&strict, at(EXP_S - 60).minus_micros(1)), Err(TokenError::NotYet));
    assert_eq!(verify(&strict, at(EXP_S - 60)), Ok(()));
    assert_eq!(verify(&strict, at(EXP_S).minus_micros(1)), Ok(()));
    assert_eq!(verify(&strict, at(EXP_S)), Err(TokenError::Expired));
    let lenient = verifier().with_leeway(Duration::from_secs(10));
    assert_eq!(verify(&lenient, at(EXP_S - 70).minus_micros(1)), Err(TokenError::NotYet));
    assert_eq!(verify(&lenient, at(EXP_S - 70)), Ok(()));
    assert_eq!(verify(&lenient, at(EXP_S + 10).minus_micros(1)), Ok(()));
    assert_eq!(verify(&lenient, at(EXP_S + 10)), Err(TokenError::Expired));
    assert_eq!(verify(&verifier().with_leeway(Duration::MAX), Timestamp::MAX), Ok(()));
}

#[test]
fn invalid_claims_are_rejected() {
    use TokenError::{Audience, Expired, Issuer, Malformed, NotYet, Subject};
    let verifier = verifier().with_issuer("https://login.example").with_audience("api").with_plan_claim("plan");
    let good = json!({"sub": "42", "exp": EXP_S, "iss": "https://login.example", "aud": "api"});
    let with = |name: &str, value: Value| {
        let mut claims = good.clone();
        claims[name] = value;
        claims
    };
    let without = |name: &str| {
        let mut claims = good.clone();
        claims.as_object_mut().unwrap().remove(name);
        claims
    };
    for (claims, expected) in [
        (good.clone(), Ok(())),
        (with("aud", json!(["other", "api"])), Ok(())),
        (with("exp", json!(1_770_120_000.5)), Ok(())),
        (with("exp", json!(1e300)), Ok(())),
        (with("exp", json!(u64::MAX)), Ok(())),
        (with("nbf", json!(0)), Ok(())),
        (with("plan", json!(7)), Ok(())),
        (with("aud", json!("other")), Err(Audience)),
        (with("aud", json!([])), Err(Audience)),
        (with("aud", json!({"api": 1})), Err(Audience)),
        (without("aud"), Err(Audience)),
        (with("iss", json!("https://login.example/")), Err(Issuer)),
        (with("iss", json!(["https://login.example"])), Err(Issuer)),
        (without("iss"), Err(Issuer)),
        (without("exp"), Err(Expired)),
        (with("exp", json!("1770120000")), Err(Malformed)),
        (with("exp", json!(-1)), Err(Malformed)),
        (with("exp", json!(null)), Err(Malformed)),
        (with("exp", json!(0)), Err(Expired)),
        (with("nbf", json!("soon")), Err(Malformed)),
        (with("nbf", json!(u64::MAX)), Err(NotYet)),
        (without("sub"), Err(Subject)),
        (with("sub", json!("")), Err(Subject)),
        (with("sub", json!(42)), Err(Subject)),
        (with("sub", json!("x".repeat(SUBJECT_BYTES_MAX + 1))), Err(Subject)),
        (json!([1, 2]), Err(Malformed)),
    ] {
        assert_eq!(verifier.verify(hs256(&claims).as_bytes(), at(1)).map(|_| ()), expected, "{claims}");
    }
}

#[test]
fn malformed_token_is_rejected_before_its_signature_is_checked() {
    let good = hs256(&json!({"sub": "42", "exp": EXP_S}));
    for token in
        ["", ".", "..", "...", "a.b", "a.b.c", "a.b.c.d", &format!("{good}."), &format!(" {good}"), &format!("{good}=")]
    {
        assert_eq!(verifier().verify(token.as_bytes(), at(0)), Err(TokenError::Malformed), "{token}");
    }
    assert_eq!(verifier().verify(b"\xff.\xff.\xff", at(0)), Err(TokenError::Malformed));
    assert_eq!(verifier().verify(&vec![b'.'; TOKEN_BYTES_MAX + 1], at(0)), Err(TokenError::TooLong));
    let deep = format!("{}.e30.", URL_SAFE_NO_PAD.encode("[".repeat(4_000)));
    assert_eq!(verifier().verify(deep.as_bytes(), at(0)), Err(TokenError::Malformed));
}

#[test]
fn unusable_key_is_refused_with_the_accepted_form() {
    let short = include_bytes!("vectors/rs256_1024_bits.pem");
    let other_curve = include_bytes!("vectors/es384.pem");
    for (result, expected) in [
        (TokenVerifier::hs256(&SECRET[1..]), "at least 32 bytes"),
        (TokenVerifier::hs256(b""), "at least 32 bytes"),
        (TokenVerifier::rs256(short), "2048 bits"),
        (TokenVerifier::rs256(ES256_PEM), "RSA public key"),
        (TokenVerifier::rs256(SECRET), "RSA public key"),
        (TokenVerifier::rs256(b""), "RSA public key"),
        (TokenVerifier::es256(other_curve), "P-256"),
        (TokenVerifier::es256(RS256_PEM), "P-256"),
    ] {
        let message = result.unwrap_err().to_string();
        assert!(message.contains(expected), "{message}");
    }
}

/// Returns the content of a PEM file.
fn der_of(pem: &[u8]) -> Vec<u8> {
    pem::parse(pem).unwrap().into_contents()
}

fn pem_of(tag: &str, der: Vec<u8>) -> Vec<u8> {
    pem::encode(&pem::Pem::new(tag, der)).into_bytes()
}

#[test]
fn rsa_key_without_its_envelope_verifies_the_same_tokens() {
    // The envelope of a 2,048-bit key has 24 bytes before the key itself.
    let pem = pem_of("RSA PUBLIC KEY", der_of(RS256_PEM).split_off(24));
    let verifier = TokenVerifier::rs256(&pem).unwrap();
    assert_eq!(&*verifier.verify(RS256_TOKEN.trim_ascii().as_bytes(), at(0)).unwrap().subject, "42");
    assert!(TokenVerifier::es256(&pem).unwrap_err().to_string().contains("P-256"));
}

#[test]
fn file_that_is_no_public_key_is_named_in_the_error() {
    for (tag, expected) in [
        ("CERTIFICATE", "certificate"),
        ("PRIVATE KEY", "private key"),
        ("RSA PRIVATE KEY", "private key"),
        ("EC PRIVATE KEY", "private key"),
        ("CERTIFICATE REQUEST", "no public key"),
    ] {
        for (refused, der) in
            [(TokenVerifier::rs256 as fn(&[u8]) -> _, der_of(RS256_PEM)), (TokenVerifier::es256, der_of(ES256_PEM))]
        {
            let message = refused(&pem_of(tag, der)).unwrap_err().to_string();
            assert!(message.contains(expected) && message.contains("as PEM (BEGIN PUBLIC KEY)"), "{tag}: {message}");
        }
    }
    for verifier in [TokenVerifier::rs256(SECRET), TokenVerifier::es256(SECRET)] {
        assert!(verifier.unwrap_err().to_string().contains("not a PEM file"));
    }
}

#[test]
fn damaged_public_key_is_refused_when_the_verifier_is_created() {
    let [rsa, ec] = [RS256_PEM, ES256_PEM].map(der_of);
    let changed = |der: &[u8], place: usize| {
        let mut der = der.to_vec();
        der[place] ^= 1;
        pem_of("PUBLIC KEY", der)
    };
    // The last byte of the exponent, then that of the modulus, before tag, length and three bytes of the exponent.
    for place in [rsa.len() - 1, rsa.len() - 6] {
        let message = TokenVerifier::rs256(&changed(&rsa, place)).unwrap_err().to_string();
        assert!(message.contains("damaged"), "{place}: {message}");
    }
    // A point that is not on the curve, and one whose form is unknown.
    for place in [ec.len() - 1, ec.len() - 65] {
        let message = TokenVerifier::es256(&changed(&ec, place)).unwrap_err().to_string();
        assert!(message.contains("P-256"), "{place}: {message}");
    }
    for (verify, der) in [(TokenVerifier::rs256 as fn(&[u8]) -> Result<_, _>, &rsa), (TokenVerifier::es256, &ec)] {
        for length in 0..der.len() {
            assert!(verify(&pem_of("PUBLIC KEY", der[..length].to_vec())).is_err(), "{length} bytes");
        }
        let longer = [der.as_slice(), &[0]].concat();
        assert!(verify(&pem_of("PUBLIC KEY", longer)).is_err());
    }
}
