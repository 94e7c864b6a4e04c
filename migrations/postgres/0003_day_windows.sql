-- All agents' day in a unit is counted from the days of the agents, when the first limit on all of them needs it.
CREATE INDEX budget_windows_day ON budget_windows (key, asset, network) WHERE kind = 'day';
