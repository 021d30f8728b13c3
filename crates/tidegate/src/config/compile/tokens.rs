//! Compiles the verification of users' tokens.

#[cfg(not(feature = "jwt"))]
use tidegate_config::Finding;
#[cfg(feature = "jwt")]
use tidegate_config::JwtAlgorithm;
use tidegate_config::{Code, Jwt, Spanned};

use super::Compiler;
#[cfg(feature = "jwt")]
use super::callers::SecretFields;
use crate::identity::Identifier;
#[cfg(feature = "jwt")]
use crate::identity::TokenVerifier;

impl Compiler<'_> {
    /// Adds an error and returns the identifier unchanged: without the feature `jwt`, tokens cannot be verified.
    #[cfg(not(feature = "jwt"))]
    pub(super) fn with_tokens(&mut self, identifier: Identifier, jwt: &Spanned<Jwt>) -> Identifier {
        let finding = Finding::new(Code::InvalidJwt, "this program was built without JWT support");
        self.note(finding.help("build it with the feature `jwt`").at(jwt.span()));
        identifier
    }

    /// Returns the identifier with verification of tokens by the settings of `[jwt]`.
    ///
    /// Reads the key from an environment variable or a file, if it is given so. Adds an error and returns the
    /// identifier unchanged if the key is missing or invalid.
    #[cfg(feature = "jwt")]
    pub(super) fn with_tokens(&mut self, identifier: Identifier, jwt: &Spanned<Jwt>) -> Identifier {
        match self.verifier(jwt) {
            Some(verifier) => identifier.with_tokens(verifier),
            None => identifier,
        }
    }

    #[cfg(feature = "jwt")]
    fn verifier(&mut self, jwt: &Spanned<Jwt>) -> Option<TokenVerifier> {
        let fields = SecretFields { text: &jwt.key, variable: &jwt.key_env, file: &jwt.key_file };
        let (key, span) = self.secret("a key for JWT", ["key", "key_env", "key_file"], fields, jwt.span())?;
        let verifier = match jwt.algorithm {
            JwtAlgorithm::Hs256 => TokenVerifier::hs256(key.reveal().as_bytes()),
            JwtAlgorithm::Rs256 => TokenVerifier::rs256(key.reveal().as_bytes()),
            JwtAlgorithm::Es256 => TokenVerifier::es256(key.reveal().as_bytes()),
        };
        let mut verifier = self.accept(verifier, Code::InvalidJwt, span)?;
        if let Some(issuer) = &jwt.issuer {
            verifier = verifier.with_issuer(issuer);
        }
        if let Some(audience) = &jwt.audience {
            verifier = verifier.with_audience(audience);
        }
        if let Some(claim) = &jwt.plan_claim {
            verifier = verifier.with_plan_claim(claim);
        }
        Some(verifier)
    }
}
