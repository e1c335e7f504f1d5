package dialect

import (
	"errors"
	"fmt"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/gormoutbox/outbox/internal/tables"
)

// Config says where the messages of an instance are kept.
type Config struct {
	// Now is the clock of a SQLite storage. Postgres uses the database's.
	// Defaults to time.Now.
	Now func() time.Time
	// Outboxes gives the message table of each outbox, by the outbox's name.
	// Several outboxes may share a table. Required.
	Outboxes map[string]tables.Name
}

func (c Config) validate() error {
	if len(c.Outboxes) == 0 {
		return errors.New("no outboxes")
	}
	for outbox, name := range c.Outboxes {
		if outbox == "" || !utf8.ValidString(outbox) || strings.ContainsRune(outbox, 0) {
			return fmt.Errorf("outbox name %q is empty or not valid UTF-8 without NUL", outbox)
		}
		if err := name.Validate(); err != nil {
			return fmt.Errorf("outbox %q: %w", outbox, err)
		}
	}
	return nil
}
