package gormoutbox

import "errors"

// What From refuses a handle for. The errors that wrap these say more.
var (
	// ErrNotInTransaction says that the handle is in no transaction, or in one
	// that has ended.
	ErrNotInTransaction = errors.New("gormoutbox: not in a transaction")
	// ErrDryRun says that the handle only builds SQL. It comes together with
	// ErrNotInTransaction, even if the handle is in a transaction, because
	// nothing would be stored.
	ErrDryRun = errors.New("the handle is a dry run")
	// ErrNotInstalled says that the handle is in a transaction which Install
	// did not see begin, so that its commit would go unnoticed.
	ErrNotInstalled = errors.New("gormoutbox: not installed where the transaction began")
)
