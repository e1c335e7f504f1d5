package dialect

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strings"
)

// Check looks at the settings of the database and says what is wrong with
// them, and how to set them right:
//
//   - The journal mode must be WAL. In another one a reader stops the writers,
//     and the other way round. A database in memory has no such mode.
//   - The busy timeout must not be 0, or the application's own transactions
//     fail as soon as two of them meet.
//   - A database in memory must be shared by the pool's connections, or there
//     must be only one: each connection to a plain :memory: opens another,
//     empty database. This is found once the tables exist.
func (s *SQLite) Check(ctx context.Context) error {
	file, err := s.file(ctx)
	if err != nil {
		return fmt.Errorf("check sqlite settings: %w", err)
	}
	problems := []error{s.checkBusyTimeout(ctx)}
	if file == "" {
		problems = append(problems, s.checkShared(ctx))
	} else {
		problems = append(problems, s.checkJournal(ctx))
	}
	if err := errors.Join(problems...); err != nil {
		return fmt.Errorf("check sqlite settings: %w", err)
	}
	return nil
}

func (s *SQLite) checkJournal(ctx context.Context) error {
	var mode string
	if err := s.db.QueryRowContext(ctx, "PRAGMA journal_mode").Scan(&mode); err != nil {
		return fmt.Errorf("read journal_mode: %w", err)
	}
	if !strings.EqualFold(mode, "wal") {
		return fmt.Errorf("the journal mode is %q; set it to WAL (PRAGMA journal_mode = WAL, once for the file)", mode)
	}
	return nil
}

func (s *SQLite) checkBusyTimeout(ctx context.Context) error {
	var millis int
	if err := s.db.QueryRowContext(ctx, "PRAGMA busy_timeout").Scan(&millis); err != nil {
		return fmt.Errorf("read busy_timeout: %w", err)
	}
	if millis <= 0 {
		return errors.New("the busy timeout is 0; set it to some seconds for every connection, such as by the DSN (_pragma=busy_timeout(5000))")
	}
	return nil
}

const hasTableText = `SELECT EXISTS (SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = ?)`

// checkShared opens a second connection beside a first and compares what they
// see.
func (s *SQLite) checkShared(ctx context.Context) error {
	if s.db.Stats().MaxOpenConnections == 1 {
		return nil
	}
	var seen [2]bool
	for i := range seen {
		c, err := s.db.Conn(ctx)
		if err != nil {
			return fmt.Errorf("take a connection: %w", err)
		}
		defer c.Close()
		if seen[i], err = hasTable(ctx, c, s.tables[0].table.MetaName()); err != nil {
			return err
		}
	}
	if seen[0] != seen[1] {
		return errors.New("each connection has a database in memory of its own; call SetMaxOpenConns(1), or name the database and share its cache (file:name?mode=memory&cache=shared)")
	}
	return nil
}

func hasTable(ctx context.Context, c *sql.Conn, name string) (found bool, err error) {
	if err := c.QueryRowContext(ctx, hasTableText, name).Scan(&found); err != nil {
		return false, fmt.Errorf("look for table %q: %w", name, err)
	}
	return found, nil
}
