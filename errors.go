package outbox

import (
	"errors"
	"fmt"

	"github.com/gormoutbox/outbox/engine"
	"github.com/gormoutbox/outbox/gormoutbox"
	"github.com/gormoutbox/outbox/migrator"
)

// What a caller may branch on, with errors.Is. The errors that wrap these say
// more.
var (
	// ErrNotInTransaction is returned by Add for a handle that is in no
	// transaction: the message could not share the fate of anything.
	ErrNotInTransaction = gormoutbox.ErrNotInTransaction
	// ErrNotInstalled says that the instance was not given to db.Use, or not
	// where the transaction began.
	ErrNotInstalled = errors.New("outbox: not installed")
	// ErrUnknownOutbox says that no outbox of that name is configured.
	ErrUnknownOutbox = errors.New("outbox: unknown outbox")
	// ErrInvalidMessage says that a message is outside its bounds. Nothing was
	// added, and the transaction can go on.
	ErrInvalidMessage = errors.New("outbox: invalid message")
	// ErrGroupBusy says that Add gave up while another transaction was adding
	// to one of the groups: by the database's lock_timeout, or because the
	// context ended. The transaction is aborted.
	ErrGroupBusy = errors.New("outbox: group is busy")
	// ErrNotMigrated says that the tables are missing or older than this
	// version of the library. AutoMigrate brings them up.
	ErrNotMigrated = migrator.ErrNotMigrated
	// ErrNoRelay says that an outbox has neither a relay nor Elsewhere.
	ErrNoRelay = errors.New("outbox: no relay")
	// ErrAlreadyRunning says that the instance was started and has not ended
	// yet or, on SQLite, that another process relays from the same file.
	ErrAlreadyRunning = engine.ErrAlreadyRunning
	// ErrStopped is returned by a Start that a Stop overtook, and is the cause
	// of a relay's context that a Stop ended.
	ErrStopped = engine.ErrStopped
	// ErrAmbiguousInstance says that several instances are installed on the
	// database: use the methods of the one that is meant.
	ErrAmbiguousInstance = errors.New("outbox: several instances on one database")

	// ErrNotAttempted stands in a BatchError for a message that was not sent,
	// for whatever reason. Such a message is never charged.
	ErrNotAttempted = engine.ErrNotAttempted
	// ErrOwnershipLost is the cause of a delivery's cancelled context when the
	// worker no longer owns the partition.
	ErrOwnershipLost = engine.ErrOwnershipLost
)

var errNoPlugin = fmt.Errorf("%w: pass the instance to db.Use first", ErrNotInstalled)
