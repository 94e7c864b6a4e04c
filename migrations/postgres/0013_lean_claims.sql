-- What each change of a claim paid for and no promise needs.
--
-- PostgreSQL parses all checks of a table anew for every statement that writes it; of a sale's work in the database these
-- were a seventh. Left are those of which no value alone can say whether it is right: how state, lease, settle request
-- and receipt belong together. Lengths, signs and words are those of the types that are written, and a row that has
-- others is refused when it is read.
ALTER TABLE claims
    DROP CONSTRAINT claims_identity_check,
    DROP CONSTRAINT claims_scope_check,
    DROP CONSTRAINT claims_call_hash_check,
    DROP CONSTRAINT claims_identifier_hash_check,
    DROP CONSTRAINT claims_session_hash_check,
    DROP CONSTRAINT claims_network_check,
    DROP CONSTRAINT claims_payer_check,
    DROP CONSTRAINT claims_nonce_check,
    DROP CONSTRAINT claims_dies_at_check,
    DROP CONSTRAINT claims_seen_at_check,
    DROP CONSTRAINT claims_offer_check,
    DROP CONSTRAINT claims_lease_token_check,
    DROP CONSTRAINT claims_settles_check,
    DROP CONSTRAINT claims_runs_check,
    DROP CONSTRAINT claims_reason_check,
    DROP CONSTRAINT claims_answer_check;
-- An event is found by its claim alone.
ALTER TABLE claim_events DROP CONSTRAINT claim_events_pkey;
DROP INDEX claim_events_identity;
ALTER TABLE claim_events ADD PRIMARY KEY (identity, id);
