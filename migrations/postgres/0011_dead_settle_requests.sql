-- A failed claim's settle request is kept while its authorization lives, and found here when it is dead.
CREATE INDEX claims_requests ON claims (network, dies_at) WHERE state = 'failed' AND settle_request IS NOT NULL;
