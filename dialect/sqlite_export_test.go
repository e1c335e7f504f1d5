package dialect

import "time"

// SetExcludeWait shortens how long Exclude waits for another process.
func (s *SQLite) SetExcludeWait(d time.Duration) { s.excludeWait = d }
